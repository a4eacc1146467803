"""Every flag of `rapidformer preprocess`, as a user types it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rapidformer.data.indexed import open_indexed
from rapidformer.log import warn_once
from tests.data.preprocess.rig import read, write_json_lines
from tests.data.preprocess.vocabularies import (
    get_library_sources,
    make_bert_file,
    make_gpt2_files,
    make_sentence_piece_file,
    write_lines,
)

ROOT = Path(__file__).parents[3]
NUMBERS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _warn_again() -> Iterator[None]:
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


@pytest.fixture
def preprocess(command: Command, tmp_path: Path) -> Command:
    """The command with an output prefix, a tokenizer of numbers and, where none is given, input."""

    def run(*words: object, tokenizer: list[str] | None = None) -> Any:
        given = [str(word) for word in words]
        if "--input" not in given:
            rows = [{"text": f"{i}", "title": f"{i + 500}"} for i in range(10)]
            given += ["--input", str(write_json_lines(tmp_path / "in.jsonl", rows))]
        flags = NUMBERS if tokenizer is None else tokenizer
        return command("preprocess", *given, "--output-prefix", "out", *flags)

    return run


def _check_fails(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "usage:" not in done.stderr
    for part in parts:
        assert part in done.stderr


def test_seeds_command_as_it_is_written(command: Command, tmp_path: Path) -> None:
    """Megatron's flags, with `--vocab` for --vocab-file."""
    vocab, merges = make_gpt2_files(tmp_path)
    vocab.rename(tmp_path / "gpt2-vocab.json")
    merges.rename(tmp_path / "gpt2-merges.txt")
    write_lines(tmp_path / "book_wiki_owtv2_small.json", get_library_sources(3))
    done = command(
        "preprocess", "--input", "book_wiki_owtv2_small.json", "--output-prefix", "gpt_small",
        "--vocab", "gpt2-vocab.json", "--dataset-impl", "mmap",
        "--tokenizer-type", "GPT2BPETokenizer", "--merge-file", "gpt2-merges.txt", "--append-eod",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "documents  3" in done.stdout
    data = open_indexed(tmp_path / "gpt_small_text_document")
    assert (data.num_documents, data[0][-1]) == (3, 0)


def test_script_at_the_root_is_the_command(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    done = subprocess.run(
        [sys.executable, ROOT / "preprocess_data.py", "--input", path, "--output-prefix", "out",
         *NUMBERS],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read(tmp_path) == [[[1]]]


def test_help_lists_every_flag_without_torch(command: Command) -> None:
    done = command("preprocess", "--help")
    assert done.returncode == 0
    for flag in (
        "--input", "--json-keys", "--text-documents", "--max-documents", "--strict",
        "--tokenizer-type", "--vocab-file", "--vocab ", "--merge-file", "--tokenizer-model",
        "--tokenizer-name-or-path", "--vocab-size", "--append-eod", "--split-sentences",
        "--keep-newlines", "--lang", "--output-prefix", "--dataset-impl", "--overwrite",
        "--workers", "--log-interval", "--part-megabytes", "--partitions",
    ):  # fmt: skip
        assert flag in done.stdout, flag
    script = (
        "import sys\nfrom rapidformer.cli.main import main\nmain(['preprocess', '--help'])\n"
        "sys.exit(str([n for n in ('torch', 'transformers', 'numpy') if n in sys.modules]))\n"
    )
    bare = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert bare.stderr == "[]\n"


def test_several_inputs_in_one_flag_or_in_several(preprocess: Command, tmp_path: Path) -> None:
    for i in range(3):
        write_json_lines(tmp_path / f"{i}.jsonl", [{"text": str(i)}])
    done = preprocess("--input", "2.jsonl", "0.jsonl", "--input", "1.jsonl")
    assert done.returncode == 0, done.stderr
    assert read(tmp_path) == [[[2]], [[0]], [[1]]]


def test_json_keys(preprocess: Command, tmp_path: Path) -> None:
    preprocess("--json-keys", "title", "text")
    assert read(tmp_path, "title_document")[0] == [[500]]
    assert read(tmp_path, "text_document")[0] == [[0]]


def test_append_eod(preprocess: Command, tmp_path: Path) -> None:
    preprocess("--append-eod")
    assert read(tmp_path)[3] == [[3, 1000]]


def test_max_documents(preprocess: Command, tmp_path: Path) -> None:
    preprocess("--max-documents", 4)
    assert len(read(tmp_path)) == 4


def test_overwrite(preprocess: Command, tmp_path: Path) -> None:
    assert preprocess().returncode == 0
    _check_fails(preprocess("--max-documents", 2), "exist already", "--overwrite")
    assert preprocess("--max-documents", 2, "--overwrite").returncode == 0
    assert len(read(tmp_path)) == 2


def test_strict(preprocess: Command, tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "bad.jsonl", [{"text": "1"}, "{"])
    _check_fails(preprocess("--strict", "--input", path), "bad.jsonl, line 2: not valid JSON")
    done = preprocess("--input", path)
    assert done.returncode == 0
    assert "skipped 1 line:" in done.stdout


def test_text_documents(preprocess: Command, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("1\n2\n\n3\n")
    preprocess("--input", "in.txt", "--text-documents", "blank-line")
    assert read(tmp_path) == [[[1, 2]], [[3]]]


def test_split_sentences_keep_newlines_and_lang(
    preprocess: Command, command: Command, tmp_path: Path
) -> None:
    vocab, merges = make_gpt2_files(tmp_path / "gpt2")
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(vocab),
                 "--merge-file", str(merges)]  # fmt: skip
    path = write_lines(tmp_path / "t.jsonl", ["Prof. One came.\n\nHe left."])

    def split(*flags: str) -> list[str]:
        done = preprocess(
            "--input", path, "--split-sentences", "--overwrite", *flags, tokenizer=tokenizer
        )
        assert done.returncode == 0, done.stderr
        from rapidformer.data.tokenizers import build_tokenizer

        decode = build_tokenizer(vocab_file=vocab, merge_file=merges).detokenize
        return [decode(sentence) for sentence in read(tmp_path, "text_sentence")[0]]

    assert split() == ["Prof. One came.", "He left."]
    assert split("--keep-newlines") == ["Prof. One came.\n\n", "He left."]
    assert split("--lang", "german") == ["Prof.", "One came.", "He left."]


def test_settings_of_sentences_without_sentences_are_reported(preprocess: Command) -> None:
    done = preprocess("--keep-newlines", "--lang", "german", "--partitions", "4")
    assert done.returncode == 0
    for flag in ("--keep-newlines", "--lang", "--partitions"):
        assert f"warning: {flag} has no effect" in done.stderr


def test_bert_without_sentences_gets_a_warning(preprocess: Command, tmp_path: Path) -> None:
    vocab = make_bert_file(tmp_path / "bert", vocab_size=400)
    tokenizer = ["--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(vocab)]
    assert "--split-sentences is missing" in preprocess(tokenizer=tokenizer).stderr
    done = preprocess("--split-sentences", tokenizer=tokenizer)
    assert "--split-sentences is missing" not in done.stderr


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer"])
def test_tokenizer_model(kind: str, preprocess: Command, tmp_path: Path) -> None:
    model = make_sentence_piece_file(tmp_path / "pieces")
    tokenizer = ["--tokenizer-type", kind, "--tokenizer-model", str(model)]
    done = preprocess("--append-eod", tokenizer=tokenizer)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path)[0][0][-1] == (302 if kind.startswith("Sentence") else 2)


def test_tokenizer_name_or_path(preprocess: Command, small_model: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", ["w1 w2"])
    done = preprocess(
        "--input", path, "--workers", "2", "--part-megabytes", "0.000001",
        tokenizer=["--tokenizer-name-or-path", str(small_model)],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert read(tmp_path) == [[[6, 7]]]


def test_workers_and_part_size(preprocess: Command, tmp_path: Path) -> None:
    done = preprocess("--workers", 2, "--part-megabytes", "0.0001")
    assert done.returncode == 0, done.stderr
    assert "2 workers)" in done.stdout
    assert read(tmp_path) == [[[i]] for i in range(10)]
    assert "1 worker)" in preprocess("--workers", 2, "--overwrite").stdout, "one part is for one"


def test_log_interval(preprocess: Command) -> None:
    words = ["--workers", 1, "--part-megabytes", "0.00001", "--overwrite"]
    lines = preprocess(*words, "--log-interval", 3).stderr.splitlines()
    progress = [line for line in lines if "documents |" in line]
    assert [line.split()[0] for line in progress] == ["3", "6", "9"]
    assert all(" MB/s | left 0:00:0" in line and " tokens | " in line for line in progress)
    assert "documents |" not in preprocess(*words).stderr, "the default is 1000"


def test_underscores_are_dashes(preprocess: Command, tmp_path: Path) -> None:
    assert preprocess("--append_eod", "--json_keys=title").returncode == 0
    assert read(tmp_path, "title_document")[0] == [[500, 1000]]


# --- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lazy", "cached"])
def test_older_formats_are_not_written(kind: str, preprocess: Command) -> None:
    _check_fails(preprocess("--dataset-impl", kind), f"--dataset-impl {kind}", "Use mmap")


def test_all_problems_are_told_at_once(command: Command, tmp_path: Path) -> None:
    write_json_lines(tmp_path / "corpus.jsonl", [{"text": "1"}])
    done = command(
        "preprocess", "--input", "corpus.json", "--output-prefx", "x", "--workers", "many",
        "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "no.json", "--lang", "englisch",
        "--json-keys", "--max-documents", "0", "--text-documents", "line", "--part-megabytes", "-1",
    )  # fmt: skip
    _check_fails(
        done,
        "error: 11 problems:",
        "unknown flag --output-prefx: did you mean --output-prefix?",
        "--json-keys needs a value.",
        "--workers many is not a whole number.",
        "--part-megabytes -1 is not a positive number.",
        "GPT2BPETokenizer needs --merge-file.",
        "--vocab-file no.json: no such file.",
        "--lang englisch is unknown", "Did you mean english?",
        "--text-documents line is unknown", "Did you mean lines?",
        "--max-documents must be positive.",
        "--output-prefix is missing",
        "--input corpus.json: no such file or folder. Did you mean corpus.jsonl?",
    )  # fmt: skip


def test_nothing_given(command: Command) -> None:
    done = command("preprocess")
    _check_fails(done, "--input is missing", "--output-prefix is missing", "no tokenizer: give")


def test_a_word_without_a_flag(preprocess: Command) -> None:
    _check_fails(preprocess("--strict", "corpus.jsonl"), "unexpected 'corpus.jsonl'")


def test_a_flag_without_its_value(command: Command) -> None:
    done = command("preprocess", "--output-prefix", "--input")
    _check_fails(done, "--output-prefix needs a value.", "--input needs a value.")
    assert "is missing" not in done.stderr


def test_a_folder_is_no_prefix(command: Command, tmp_path: Path) -> None:
    write_json_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    for prefix in (".", "new/"):
        done = command("preprocess", "--input", "in.jsonl", "--output-prefix", prefix, *NUMBERS)
        _check_fails(done, f"--output-prefix {prefix} is a folder")
    shutil.rmtree(tmp_path / "new", ignore_errors=True)
    done = command("preprocess", "--input", "in.jsonl", "--output-prefix", "new/out", *NUMBERS)
    assert done.returncode == 0, "a folder that is not there is made"
    assert read(tmp_path / "new") == [[[1]]]


def test_keys_that_cannot_be_names(preprocess: Command) -> None:
    _check_fails(
        preprocess("--json-keys", "a/b", "c", "c"), "a/b: the key becomes a part", "names c twice"
    )
