"""Lines that cannot be used: counted with their reason and number, or the end of a strict run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapidformer.data.preprocess import format_summary
from rapidformer.data.tokenizers import build_tokenizer
from rapidformer.errors import DataError
from tests.data.preprocess.rig import read, run, write_json_lines
from tests.data.preprocess.vocabularies import make_gpt2_files

BAD: dict[str, tuple[object, str]] = {
    "not valid JSON": ('{"text": "1', "Unterminated string"),
    "not a JSON object": ("null", "null"),
    "no key 'text'": ({"body": "1"}, "its keys: body"),
    "'text' is not a string": ({"text": [1, 2]}, "list: "),
    "not UTF-8": (b'{"text": "\xff"}', "byte 10 of the line"),
    "refused by the tokenizer": ({"text": "1 x"}, "integers"),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_line_is_counted_with_its_number(reason: str, tmp_path: Path) -> None:
    line, detail = BAD[reason]
    rows = [{"text": "1"}, line, {"text": "2"}, "", line]
    path = write_json_lines(tmp_path / "in.jsonl", rows)
    summary = run(tmp_path, path)
    assert read(tmp_path) == [[[1]], [[2]]]
    problem = summary.problems[reason]
    assert (problem.count, [place[:2] for place in problem.first]) == (2, [(0, 2), (0, 5)])
    assert detail in problem.first[0][2]
    assert summary.counts["text"].empty == 1, "a blank line is an empty document"
    assert f"{reason}: 2 ({path} line 2, 5)" in format_summary(summary)


@pytest.mark.parametrize("reason", BAD)
def test_a_strict_run_stops_at_it_and_leaves_nothing(reason: str, tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "in.jsonl", [{"text": "1"}, "", BAD[reason][0]])
    with pytest.raises(DataError) as caught:
        run(tmp_path, path, strict=True)
    assert str(caught.value).startswith(f"{path}, line 3: {reason}")
    assert [child.name for child in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_strict_run_names_the_first_bad_line_of_all_workers(tmp_path: Path) -> None:
    rows = [{"text": "1"} for _ in range(3000)]
    files = []
    for number in range(2):
        bad = [*rows[:2000], "{early" if number == 0 else "{late", *rows[2000:]]
        files.append(write_json_lines(tmp_path / f"in{number}.jsonl", bad))
    with pytest.raises(DataError, match=r"in0.jsonl, line 2001: not valid JSON.*\{early"):
        run(tmp_path, *reversed(files[:1]), files[1], strict=True, workers=2, part_bytes=20_000)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["in0.jsonl", "in1.jsonl"]


def test_a_strict_run_is_content_with_good_lines(tmp_path: Path) -> None:
    run(tmp_path, write_json_lines(tmp_path / "in.jsonl", [{"text": "1"}, ""]), strict=True)
    assert read(tmp_path) == [[[1]]]


def test_half_a_surrogate_pair_is_not_text(tmp_path: Path) -> None:
    vocab, merges = make_gpt2_files(tmp_path / "gpt2", vocab_size=300)
    tokenizer = build_tokenizer(vocab_file=vocab, merge_file=merges)
    rows = ['{"text": "a"}', '{"text": "b \\ud83d c"}', '{"text": "\\ud83d\\ude42"}']
    path = write_json_lines(tmp_path / "in.jsonl", rows)
    summary = run(tmp_path, path, tokenizer=tokenizer)
    assert summary.counts["text"].documents == 2
    assert summary.problems["not valid Unicode"].first == [
        (0, 2, "character 2 is half a surrogate pair")
    ]


def test_line_numbers_go_through_parts_and_files(tmp_path: Path) -> None:
    rows = [{"text": str(i)} for i in range(200)]
    rows_with_bad: list[object] = [*rows[:150], "{bad", *rows[150:]]
    first = write_json_lines(tmp_path / "a.jsonl", rows)
    second = write_json_lines(tmp_path / "b.jsonl", rows_with_bad)
    summary = run(tmp_path, first, second, part_bytes=300)
    assert summary.parts > 10
    assert f"not valid JSON: 1 ({second} line 151)" in format_summary(summary)


def test_only_the_first_lines_are_listed(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "in.jsonl", [{"text": "1"}, *["{"] * 50])
    told = format_summary(run(tmp_path, path, part_bytes=40))
    assert f"not valid JSON: 50 ({path} line 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...)" in told


def test_a_record_without_one_of_the_keys_is_left_out_for_all(tmp_path: Path) -> None:
    rows = [{"a": "1", "b": "2"}, {"a": "3"}, {"a": "5", "b": "x"}, {"a": "7", "b": "8"}]
    run(tmp_path, write_json_lines(tmp_path / "in.jsonl", rows), json_keys=("a", "b"))
    assert read(tmp_path, "a_document") == [[[1]], [[7]]]
    assert read(tmp_path, "b_document") == [[[2]], [[8]]]
