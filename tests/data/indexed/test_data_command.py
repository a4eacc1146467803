"""``rapidformer data`` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rapidformer.cli.data import run
from rapidformer.errors import ConfigurationError, DataError, RapidformerError

from .rig import GOLDEN, GOLDEN_BIN, GOLDEN_IDX, encode, encode_legacy, read, save, write


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "golden", GOLDEN_BIN, GOLDEN_IDX)


def test_info_tells_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    run(["info", "golden.idx"])
    assert capsys.readouterr().out.splitlines() == [
        "golden",
        "  format        mmap",
        "  documents     3",
        "  sequences     4",
        "  tokens        10 of uint16",
        "  bytes         .bin 20, .idx 114",
        "  per document  min 1, mean 3.33, median 4, max 5 tokens",
        "  per sequence  min 1, mean 2.5, median 2.5, max 4 tokens",
        "  damage        none",
    ]


def test_info_as_json_has_one_line_per_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "old", *encode_legacy(GOLDEN))
    write(tmp_path / "empty", [])
    run(["info", "golden", "old", "empty", "--json"])
    golden, old, empty = map(json.loads, capsys.readouterr().out.splitlines())
    assert golden == {
        "prefix": "golden",
        "bin_bytes": 20,
        "idx_bytes": 114,
        "damage": [],
        "format": "mmap",
        "documents": 3,
        "sequences": 4,
        "tokens": 10,
        "dtype": "uint16",
        "multimodal": False,
        "document_length": {"min": 1, "mean": 3.33, "median": 4.0, "max": 5},
        "sequence_length": {"min": 1, "mean": 2.5, "median": 2.5, "max": 4},
    }
    assert (old["format"], old["dtype"], old["tokens"]) == ("cached", "int32", 10)
    assert empty["documents"] == 0 and empty["document_length"] is None


def test_info_shows_the_damage_and_the_other_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "short", GOLDEN_BIN[:-2], GOLDEN_IDX)
    with pytest.raises(DataError, match="short, goldn cannot be used for training"):
        run(["info", "short", "goldn", "golden"])
    shown = capsys.readouterr().out
    assert "bytes         .bin 18, .idx 114\n  problem       the .bin has 18 bytes" in shown
    assert "problem       goldn.bin and goldn.idx are missing: did you mean golden?" in shown
    assert "tokens        10 of uint16" in shown
    with pytest.raises(DataError):
        run(["info", "short", "--json"])
    assert len(json.loads(capsys.readouterr().out)["damage"]) == 1


def test_head_shows_ids_without_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    run(["head", "golden", "-n", "2"])
    assert capsys.readouterr().out.splitlines() == [
        "--- document 0: 2 sequences, 5 tokens",
        "1 2 3",
        "4 5",
        "--- document 1: 1 sequence, 1 token",
        "6",
    ]
    run(["head", "golden", "--tokens", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["--- document 0: 2 sequences, 5 tokens", "1 2 3", "... 2 more tokens"]
    assert lines[-2:] == ["7 8 9", "... 1 more token"]


def test_head_shows_text_with_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    write(tmp_path / "text", [[[5, 6, 8, 7, 9]], [[5], [6]]])
    flags = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab", "vocab.txt"]
    run(["head", "text", *flags])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("the cats sat") and lines[3:] == ["the", "cat"]
    write(tmp_path / "large", [[[5, 40000]]])
    with pytest.raises(DataError, match=r"token id 40000, but .* created with another tokenizer"):
        run(["head", "large", *flags])


def test_head_of_long_documents_is_short_unless_all_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "long", [[[1] * 1000, [2]]])
    run(["head", "long"])
    assert capsys.readouterr().out.endswith("... 745 more tokens\n")
    run(["head", "long", "--tokens", "0"])
    assert capsys.readouterr().out.endswith("1 1\n2\n")
    write(tmp_path / "empty", [])
    run(["head", "empty"])
    assert capsys.readouterr().out == "empty has no documents.\n"


def test_merge_of_prefixes_and_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["merge", "--input", "golden", "golden", "--output_prefix", "parts/b"])
    assert "2 pairs merged\nparts/b\n" in capsys.readouterr().out
    write(tmp_path / "parts" / "a", [[[11]]])
    (tmp_path / "parts" / "readme.txt").write_text("no data")
    run(["merge", "--input", "parts", "--output-prefix=all"])
    assert read(tmp_path / "all") == encode([[[11]], *GOLDEN, *GOLDEN], np.uint16)


def test_merge_replaces_nothing_unasked(tmp_path: Path) -> None:
    write(tmp_path / "all", [[[1]]])
    words = ["merge", "--input", "golden", "--output-prefix", "all"]
    with pytest.raises(DataError, match=r"all.bin already exists: .* --overwrite"):
        run(words)
    run([*words, "--overwrite"])
    assert read(tmp_path / "all") == (GOLDEN_BIN, GOLDEN_IDX)


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "usage: rapidformer data"),
        (["inf", "golden"], "invalid choice: 'inf'"),
        (["info"], "required: PREFIX\nusage: rapidformer data info"),
        (["head", "golden", "-n", "0", "--tokens", "-1"], "2 problems"),
        (["head", "golden", "-n", "few"], "invalid int value"),
        (["head", "golden", "--tokenizer-type", "Nonsense"], "Nonsense is unknown"),
        (["merge", "--input", "golden"], "required: --output-prefix"),
    ],
)
def test_wrong_flags_are_reported_as_our_own_error(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run(words)


def test_user_errors_are_ours(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    for words in (
        ["head", "gone"],
        ["merge", "--input", "bare", "--output-prefix", "all"],
        ["merge", "--input", "golden", "--output-prefix", "bare/"],
    ):
        with pytest.raises(RapidformerError):
            run(words)


def test_help_answers_without_torch() -> None:
    code = (
        "import sys\nfrom rapidformer.cli.main import main\nmain(['data', '--help'])\n"
        "main(['data', 'merge', '-h'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for part in ("info", "head", "merge", "--output-prefix PREFIX"):
        assert part in done.stdout
