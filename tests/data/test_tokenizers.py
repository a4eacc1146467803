"""Tokenizers: transformers' ids, Megatron's special tokens, errors that name the flag."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rapidformer.data.tokenizers import TOKENIZER_TYPES, Tokenizer, build_tokenizer
from rapidformer.data.tokenizers.build import adopt_hugging_face, load_hugging_face
from rapidformer.errors import ConfigurationError, DataError, RapidformerError
from tests.data.preprocess.vocabularies import (
    TEXTS,
    get_library_sources,
    make_bert_file,
    make_gpt2_files,
    make_random_text,
    make_sentence_piece_file,
)


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_gpt2_files(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def bert_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert_file(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def gpt2(gpt2_files: tuple[Path, Path]) -> Tokenizer:
    vocab, merges = gpt2_files
    return build_tokenizer(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)


@pytest.fixture(scope="module")
def bert(bert_file: Path) -> Tokenizer:
    return build_tokenizer(tokenizer_type="BertWordPieceLowerCase", vocab_file=bert_file)


@pytest.fixture(scope="module")
def sentence_piece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sentence_piece_file(tmp_path_factory.mktemp("pieces"))


# --- the same ids as transformers ----------------------------------------------------------------


@pytest.mark.parametrize("lower_case", [True, False])
def test_wordpiece_ids_are_those_of_transformers(bert_file: Path, lower_case: bool) -> None:
    from transformers import BertTokenizerFast

    theirs = BertTokenizerFast(vocab=str(bert_file), do_lower_case=lower_case)
    kind = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
    ours = build_tokenizer(tokenizer_type=kind, vocab_file=bert_file)
    texts = TEXTS + get_library_sources(4, seed=1)
    expected = theirs(texts, add_special_tokens=False, verbose=False).input_ids
    assert ours.tokenize_batch(texts) == expected
    assert [ours.tokenize(text) for text in texts] == expected
    assert len({tuple(ids) for ids in expected}) > 12


def test_bpe_ids_are_those_of_transformers(gpt2_files: tuple[Path, Path], gpt2: Tokenizer) -> None:
    from transformers import GPT2TokenizerFast

    theirs = GPT2TokenizerFast(vocab=str(gpt2_files[0]), merges=str(gpt2_files[1]))
    texts = TEXTS + get_library_sources(4, seed=1)
    expected = theirs(texts, add_special_tokens=False, verbose=False).input_ids
    assert gpt2.tokenize_batch(texts) == expected
    assert [gpt2.detokenize(ids) for ids in expected] == texts


@pytest.mark.parametrize("kind", ["gpt2", "bert", "cased"])
def test_remembered_words_never_change_the_ids(
    kind: str, gpt2: Tokenizer, bert: Tokenizer, bert_file: Path
) -> None:
    cased = build_tokenizer(tokenizer_type="BertWordPieceCase", vocab_file=bert_file)
    tokenizer = {"gpt2": gpt2, "bert": bert, "cased": cased}[kind]
    dice = random.Random(0)
    texts = [make_random_text(dice, dice.randrange(1, 25)) for _ in range(3000)]
    texts += [make_random_text(dice, 400) for _ in range(40)] + TEXTS
    backend = tokenizer._backend  # type: ignore[attr-defined]
    expected = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert tokenizer._memory is not None  # type: ignore[attr-defined]
    assert tokenizer.tokenize_batch(texts) == expected
    assert tokenizer.tokenize_batch(texts) == expected, "the second time from memory"
    # The ids alone do not show every wrong cut: where no merge crosses it, they are the same.
    for text in texts:
        words = tokenizer._memory.find_words(text)  # type: ignore[attr-defined]
        if words is not None:
            assert _pre_tokenize(backend, *words) == _pre_tokenize(backend, text), repr(text)


def _pre_tokenize(backend: Any, *texts: str) -> list[str]:
    pieces: list[str] = []
    for text in texts:
        normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
        pieces += [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]
    return pieces


def test_other_rules_than_those_of_gpt2_and_bert_are_left_to_the_library() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers

    from rapidformer.data.tokenizers.rust import build_word_memory

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert build_word_memory(backend) is not None
    backend.normalizer = normalizers.NFC()
    assert build_word_memory(backend) is None
    backend.normalizer = None  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert build_word_memory(backend) is None
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert build_word_memory(backend) is None


def test_texts_of_long_words_are_left_to_the_library(gpt2: Tokenizer, bert: Tokenizer) -> None:
    """For GPT-2 a Chinese clause is a word that seldom comes again; for BERT each character is."""
    text = next(text for text in TEXTS if text.startswith("全部"))
    assert gpt2._memory.tokenize(text) is None  # type: ignore[attr-defined]
    assert bert._memory.tokenize(text) is not None  # type: ignore[attr-defined]
    assert gpt2.tokenize_batch(["a", text, "b"])[1] == gpt2.tokenize(text) != []


def test_a_word_may_have_200_characters_as_in_googles_bert(bert: Tokenizer) -> None:
    assert len(bert.tokenize("a" * 200)) > 1
    assert bert.tokenize("a" * 201) == [bert.vocab["[UNK]"]]


def test_special_tokens_in_a_text_are_text(gpt2: Tokenizer, bert: Tokenizer) -> None:
    assert gpt2.eod not in gpt2.tokenize("a <|endoftext|> b")
    assert bert.mask not in bert.tokenize("a [MASK] b [EOS]")
    assert bert.eos not in bert.tokenize("a [MASK] b [EOS]")


def test_a_byte_that_the_vocabulary_lacks_becomes_its_first_token(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"!": 0, "a": 1, "b": 2, "ab": 3, "<|endoftext|>": 4}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    tokenizer = build_tokenizer(
        vocab_file=tmp_path / "vocab.json", merge_file=tmp_path / "merges.txt"
    )
    assert tokenizer.name == "GPT2BPETokenizer"
    assert tokenizer.tokenize("abxa") == [3, 0, 1]


# --- special tokens and sizes --------------------------------------------------------------------


def test_bert_gets_bos_and_eos_behind_its_pieces(bert: Tokenizer, bert_file: Path) -> None:
    pieces = len(bert_file.read_text("utf-8").splitlines())
    assert bert.vocab_size == pieces + 2
    assert (bert.bos, bert.eos) == (pieces, pieces + 1)
    assert bert.eod == bert.eos
    assert [bert.pad, bert.cls, bert.sep, bert.mask] == [0, 2, 3, 4]
    assert bert.inv_vocab[bert.eos] == "[EOS]"


def test_bos_and_eos_that_are_there_are_not_added_again(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n[EOS]\nword\n")
    tokenizer = build_tokenizer(tokenizer_type="BertWordPieceCase", vocab_file=path)
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.bos) == (8, 5, 7)


def test_gpt2_ends_documents_with_endoftext(gpt2: Tokenizer) -> None:
    assert gpt2.vocab_size == 2000
    assert gpt2.eod == gpt2.eos == gpt2.vocab["<|endoftext|>"]
    assert gpt2.detokenize([*gpt2.tokenize("x"), gpt2.eod]) == "x<|endoftext|>"


def test_a_token_that_is_not_there_is_named(gpt2: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"GPT2BPETokenizer has no mask token \(mask\).*eod, eos"):
        _ = gpt2.mask
    assert not gpt2.has_special("cls")


@pytest.mark.parametrize("kind", ["gpt2", "bert", "pieces", "null"])
def test_extra_ids_come_after_everything(
    kind: str, gpt2_files: tuple[Path, Path], bert_file: Path, sentence_piece_file: Path
) -> None:
    options = {
        "gpt2": {"vocab_file": gpt2_files[0], "merge_file": gpt2_files[1]},
        "bert": {"tokenizer_type": "BertWordPieceCase", "vocab_file": bert_file},
        "pieces": {
            "tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": sentence_piece_file,
        },
        "null": {"tokenizer_type": "NullTokenizer", "vocab_size": 50},
    }[kind]  # fmt: skip
    without = build_tokenizer(**options)  # type: ignore[arg-type]
    assert without.additional_special_tokens_ids == []
    tokenizer = build_tokenizer(**options, vocab_extra_ids=3)  # type: ignore[arg-type]
    size = without.vocab_size
    assert tokenizer.vocab_size == size + 3
    assert tokenizer.additional_special_tokens_ids == [size, size + 1, size + 2]
    shown = tokenizer.detokenize([tokenizer.vocab["1" if kind == "null" else "a"], size + 1])
    assert shown.endswith("<extra_id_1>")
    assert without.fingerprint != tokenizer.fingerprint


def test_word_starts_are_all_but_continuing_pieces(bert: Tokenizer) -> None:
    continuing = [i for token, i in bert.vocab.items() if token.startswith("##")]
    assert continuing
    assert not bert.word_starts[continuing].any()
    assert bert.word_starts.sum() == bert.vocab_size - len(continuing)
    assert bert.word_starts[bert.cls]
    assert not bert.word_starts[continuing[0]]


def test_wordpieces_are_joined_again(bert: Tokenizer) -> None:
    assert bert.detokenize([bert.cls, *bert.tokenize("Return SELF!")]) == "[CLS] return self !"


def test_ids_of_another_tokenizer_are_refused(gpt2: Tokenizer, bert: Tokenizer) -> None:
    for tokenizer in (gpt2, bert):
        with pytest.raises(DataError, match=r"60000 is not in the vocabulary.*another tokenizer"):
            tokenizer.detokenize([1, 60000])


# --- the other kinds -----------------------------------------------------------------------------


def test_null_tokenizer_takes_numbers_as_they_are() -> None:
    tokenizer = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=100)
    assert tokenizer.tokenize("5 7  99") == [5, 7, 99]
    assert (tokenizer.eod, tokenizer.vocab_size) == (100, 101)
    assert tokenizer.detokenize([5, 7]) == "5 7"
    with pytest.raises(DataError, match="100 is out of range: --vocab-size 100 allows 0 to 99"):
        tokenizer.tokenize("5 100")
    with pytest.raises(DataError, match="integers"):
        tokenizer.tokenize("5 x")


def test_sentence_piece_appends_special_tokens_in_megatrons_order(
    sentence_piece_file: Path,
) -> None:
    import sentencepiece

    tokenizer = build_tokenizer(
        tokenizer_type="SentencePieceTokenizer", tokenizer_model=sentence_piece_file
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(sentence_piece_file))
    appended = [tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask, tokenizer.pad]
    assert appended == [300, 301, 302, 303, 304]
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size) == (1, 2, 305)
    assert tokenizer.tokenize("def f(x)") == model.encode("def f(x)")
    assert tokenizer.tokenize("def<MASK>x") == [*model.encode("def"), 303, *model.encode("x")]
    assert tokenizer.detokenize([*model.encode("def f"), 303]) == "def f <MASK>"
    texts = ["import os", "a<SEP>b"]
    assert tokenizer.tokenize_batch(texts) == [tokenizer.tokenize(text) for text in texts]


def test_gpt_sentence_piece_takes_the_model_as_it_is(sentence_piece_file: Path) -> None:
    tokenizer = build_tokenizer(
        tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=sentence_piece_file
    )
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.eos) == (300, 2, 2)
    assert 2 not in tokenizer.tokenize("a</s>b")
    assert tokenizer.detokenize(tokenizer.tokenize("import os")) == "import os"
    with pytest.raises(DataError, match="no padding token"):
        _ = tokenizer.pad


def test_hugging_face_folder_gives_its_ids_without_special_tokens(
    gpt2: Tokenizer, gpt2_files: tuple[Path, Path], tmp_path: Path
) -> None:
    from transformers import GPT2TokenizerFast

    theirs = GPT2TokenizerFast(vocab=str(gpt2_files[0]), merges=str(gpt2_files[1]))
    theirs.save_pretrained(tmp_path)
    tokenizer = build_tokenizer(tokenizer_name_or_path=str(tmp_path))
    assert tokenizer.name == "HuggingFaceTokenizer"
    assert tokenizer.tokenize_batch(TEXTS) == gpt2.tokenize_batch(TEXTS)
    # Here a special token in a text is one, as transformers has it.
    text = "a<|endoftext|>b"
    assert tokenizer.tokenize(text) == theirs(text).input_ids
    assert tokenizer.eod in tokenizer.tokenize(text)
    assert (tokenizer.eod, tokenizer.vocab_size) == (theirs.eos_token_id, len(theirs))


def test_hugging_face_bert_adds_no_cls_and_no_sep(small_model: Path) -> None:
    tokenizer = build_tokenizer(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_name_or_path=str(small_model)
    )
    assert tokenizer.tokenize("w1 w2") == [6, 7]
    assert (tokenizer.cls, tokenizer.sep, tokenizer.pad, tokenizer.mask) == (2, 3, 0, 4)
    assert not tokenizer.has_special("eod")


def test_limits_of_a_tokenizer_json_do_not_cut_a_corpus(small_model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((small_model / name).read_bytes())
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = build_tokenizer(tokenizer_name_or_path=str(tmp_path))
    assert len(tokenizer.tokenize("w1 " * 10)) == 10


def test_tokenizers_without_a_library_of_their_own_work_too() -> None:
    class Letters:
        is_fast = False
        eos_token_id = 3

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1, "<extra_id_0>": 2, "</s>": 3}

        def __call__(self, texts: list[str], **options: object) -> dict[str, list[list[int]]]:
            assert options["add_special_tokens"] is False
            return {"input_ids": [[self.get_vocab()[letter] for letter in t] for t in texts]}

        def decode(self, ids: list[int]) -> str:
            return "".join("ab"[i] for i in ids)

    tokenizer = adopt_hugging_face(Letters())
    assert tokenizer.tokenize_batch(["ab", "b"]) == [[0, 1], [1]]
    assert tokenizer.detokenize([1, 0]) == "ba"
    assert (tokenizer.eod, tokenizer.additional_special_tokens_ids) == (3, [2])


@pytest.mark.parametrize("kind", ["gpt2", "bert", "pieces"])
def test_a_pickled_tokenizer_is_the_same(
    kind: str, gpt2: Tokenizer, bert: Tokenizer, sentence_piece_file: Path
) -> None:
    pieces = build_tokenizer(
        tokenizer_type="SentencePieceTokenizer", tokenizer_model=sentence_piece_file
    )
    tokenizer = {"gpt2": gpt2, "bert": bert, "pieces": pieces}[kind]
    again = pickle.loads(pickle.dumps(tokenizer))
    text = TEXTS[1]
    assert again.tokenize(text) == tokenizer.tokenize(text)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.eod == tokenizer.eod


def test_tokenizers_of_files_need_neither_torch_nor_transformers(
    gpt2_files: tuple[Path, Path],
) -> None:
    script = (
        "import sys\nfrom rapidformer.data.tokenizers import build_tokenizer\n"
        f"build_tokenizer(vocab_file={str(gpt2_files[0])!r}, merge_file={str(gpt2_files[1])!r})\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


# --- errors --------------------------------------------------------------------------------------


def test_all_missing_files_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ConfigurationError) as caught:
        build_tokenizer(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=tmp_path / "vocab.jsn",
            merge_file=tmp_path,
        )
    assert len(caught.value.problems) == 2
    assert f"Did you mean {tmp_path / 'vocab.json'}?" in caught.value.problems[0]
    assert "is a folder, not a file" in caught.value.problems[1]


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"tokenizer_type": "GPT2BPETokenizer"}, ["--vocab-file", "--merge-file"]),
        ({"tokenizer_type": "BertWordPieceCase"}, ["--vocab-file"]),
        ({"tokenizer_type": "SentencePieceTokenizer"}, ["--tokenizer-model"]),
        ({"tokenizer_type": "NullTokenizer"}, ["--vocab-size"]),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, ["--tokenizer-name-or-path"]),
    ],
)
def test_what_a_type_needs_is_named(options: dict[str, str], needed: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build_tokenizer(**options)  # type: ignore[arg-type]
    told = [f"--tokenizer-type {options['tokenizer_type']} needs {flag}." for flag in needed]
    assert caught.value.problems == told


def test_an_unknown_type_has_a_near_name() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean GPT2BPETokenizer"):
        build_tokenizer(tokenizer_type="GPT2BPE")
    with pytest.raises(ConfigurationError, match="no tokenizer") as caught:
        build_tokenizer(vocab_file="vocab.txt")
    assert all(kind in str(caught.value) for kind in TOKENIZER_TYPES)


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("BertWordPieceCase", b"[PAD]\n[CLS]\nword\n", r"lacks \[SEP\], \[MASK\], \[UNK\]"),
        ("BertWordPieceCase", b"\xff\xfe[PAD]\n", "not UTF-8"),
        ("BertWordPieceCase", b'{"a": 0}', "one piece per line"),
        ("BertWordPieceCase", b"", "is empty"),
        ("GPT2BPETokenizer", b'{"a": 0}', r"lacks <\|endoftext\|>"),
        ("GPT2BPETokenizer", b"a\nb\n", r"not JSON \(Expecting value: line 1"),
        ("GPT2BPETokenizer", b"[" * 100_000, r"not JSON \(it is nested too deeply\)"),
        ("GPT2BPETokenizer", b"[1, 2]", "must be a JSON object"),
        ("GPT2BPETokenizer", b'{"a": "b"}', "ids are whole numbers"),
        ("SentencePieceTokenizer", b"something", "not a SentencePiece model"),
    ],
)
def test_a_wrong_file_is_explained(
    kind: str, content: bytes, message: str, tmp_path: Path, gpt2_files: tuple[Path, Path]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    name = "tokenizer_model" if kind.startswith("Sentence") else "vocab_file"
    options = {name: path}
    if kind.startswith("GPT2"):
        options["merge_file"] = gpt2_files[1]
    with pytest.raises(RapidformerError, match=message) as caught:
        build_tokenizer(tokenizer_type=kind, **options)  # type: ignore[arg-type]
    assert str(path) in str(caught.value)


def test_merges_of_another_vocabulary_are_refused(
    tmp_path: Path, gpt2_files: tuple[Path, Path]
) -> None:
    merges = tmp_path / "merges.txt"
    merges.write_text("#version: 0.2\nqqq zzz\n")
    with pytest.raises(DataError, match="does not match"):
        build_tokenizer(vocab_file=gpt2_files[0], merge_file=merges)
    merges.write_text("#version: 0.2\na b c\n")
    with pytest.raises(DataError, match=r"line 2: a merge is two pieces.*'a b c'"):
        build_tokenizer(vocab_file=gpt2_files[0], merge_file=merges)


def test_a_tokenizer_with_code_of_its_own_is_not_run(small_model: Path, tmp_path: Path) -> None:
    """transformers asked for an option that there is not here; the way out works."""
    from transformers import AutoTokenizer

    folder = shutil.copytree(small_model, tmp_path / "own")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match=r"own Python code, .*backend_tokenizer\.save"):
        load_hugging_face(str(folder))
    (tmp_path / "plain").mkdir()
    AutoTokenizer.from_pretrained(small_model).backend_tokenizer.save(
        str(tmp_path / "plain" / "tokenizer.json")
    )
    plain = load_hugging_face(str(tmp_path / "plain"))
    assert plain.tokenize("w1 w2") == load_hugging_face(str(small_model)).tokenize("w1 w2")


def test_hugging_face_locations_are_explained(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    for location, message in (
        (str(tmp_path), "lacks a tokenizer .*holds weights.bin"),
        (str(tmp_path / "weights.bin"), "is a file: give the folder"),
        (str(tmp_path / "nowhere"), "no such folder"),
        ("some-org/some-model", "neither a local .* nor in the local cache"),
    ):
        with pytest.raises(DataError, match=message):
            build_tokenizer(tokenizer_name_or_path=location)


def test_a_missing_package_is_named(
    sentence_piece_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(RapidformerError, match=r"pip install 'rapidformer\[sentencepiece\]'"):
        build_tokenizer(
            tokenizer_type="SentencePieceTokenizer", tokenizer_model=sentence_piece_file
        )
