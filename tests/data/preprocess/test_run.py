"""What is written: documents in the order of the input, end tokens, dropped sentences, bytes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from rapidformer.data.indexed import open_indexed
from rapidformer.data.preprocess import format_summary
from rapidformer.data.tokenizers import build_tokenizer
from rapidformer.errors import ConfigurationError, DataError
from tests.data.preprocess.rig import build_numbers, read, read_bytes, run, write_json_lines
from tests.data.preprocess.vocabularies import get_library_sources, make_gpt2_files, write_lines


def test_each_line_is_a_document(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "in.jsonl", [{"text": "1 2"}, {"text": "3", "id": 7}])
    summary = run(tmp_path, path)
    assert read(tmp_path) == [[[1, 2]], [[3]]]
    assert summary.counts["text"].tokens == 3
    assert not list(tmp_path.glob("*.parts"))


def test_the_golden_bytes_of_the_format(tmp_path: Path) -> None:
    """Documents [[1,2,3],[4,5]], [[6]], [[7,8,9,10]]: checked against Megatron's own writer."""
    rows = [{"text": ["1 2 3", "4 5"]}, {"text": ["6"]}, {"text": "7 8 9 10"}]
    run(tmp_path, write_json_lines(tmp_path / "in.jsonl", rows))
    data, index = read_bytes(tmp_path / "out_text_document")
    assert data.hex() == "0100020003000400050006000700080009000a00"
    assert index.hex() == (
        "4d4d494449445800000100000000000000080400000000000000040000000000000003000000020000000100"
        "0000040000000000000000000000060000000000"
        "00000a000000000000000c00000000000000000000000000000002000000000000000300000000000000"
        "0400000000000000"
    )


def test_the_end_of_document_goes_to_the_last_sentence_that_has_tokens(tmp_path: Path) -> None:
    rows = [{"text": ["1", "", "2 3", " "]}, {"text": ["", " "]}, {"text": ""}, {"text": "4"}]
    summary = run(tmp_path, write_json_lines(tmp_path / "in.jsonl", rows), append_eod=True)
    assert read(tmp_path) == [[[1], [2, 3, 1000]], [[4, 1000]]]
    assert summary.counts["text"].empty == 2
    assert "empty      2 documents without any token" in format_summary(summary)


def test_without_append_eod_there_is_no_end_token(tmp_path: Path) -> None:
    run(tmp_path, write_json_lines(tmp_path / "in.jsonl", [{"text": "1"}]))
    assert read(tmp_path) == [[[1]]]


def test_sentences_become_sequences(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", ".", "?"]
    vocab.write_text("".join(word + "\n" for word in words))
    tokenizer = build_tokenizer(tokenizer_type="BertWordPieceLowerCase", vocab_file=vocab)
    path = write_lines(tmp_path / "in.jsonl", ["One. Two? One two.", "Two."])
    run(tmp_path, path, tokenizer=tokenizer, split_sentences=True, append_eod=True)
    assert read(tmp_path, "text_sentence") == [[[5, 7], [6, 8], [5, 6, 7, 10]], [[6, 7, 10]]]


def test_several_keys_have_files_of_their_own(tmp_path: Path) -> None:
    rows = [{"title": "1", "text": "2 3"}, {"title": "", "text": "4"}]
    path = write_json_lines(tmp_path / "in.jsonl", rows)
    summary = run(tmp_path, path, json_keys=("text", "title"))
    assert read(tmp_path) == [[[2, 3]], [[4]]]
    assert read(tmp_path, "title_document") == [[[1]]]
    assert summary.counts["title"].empty == 1


def test_a_key_that_is_always_empty_still_has_its_files(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "in.jsonl", [{"a": "", "b": "1"}])
    run(tmp_path, path, json_keys=("a", "b"))
    assert len(open_indexed(tmp_path / "out_a_document")) == 0


@pytest.mark.parametrize(("size", "dtype"), [(65498, "uint16"), (65499, "int32")])
def test_the_token_type_follows_the_vocabulary(size: int, dtype: str, tmp_path: Path) -> None:
    """The vocabulary is one larger than the numbers: the end of a document belongs to it."""
    path = write_json_lines(tmp_path / "in.jsonl", [{"text": f"{size - 1}"}])
    summary = run(tmp_path, path, tokenizer=build_numbers(size), append_eod=True)
    assert open_indexed(tmp_path / "out_text_document").dtype == np.dtype(dtype)
    assert read(tmp_path) == [[[size - 1, size]]]
    assert summary.dtype == dtype


def test_bytes_do_not_depend_on_workers_nor_on_parts(tmp_path: Path) -> None:
    vocab, merges = make_gpt2_files(tmp_path / "gpt2")
    tokenizer = build_tokenizer(vocab_file=vocab, merge_file=merges)
    files = [
        write_lines(tmp_path / f"in{i}.jsonl", get_library_sources(12, seed=i)) for i in range(2)
    ]
    made = set()
    for number, (workers, part_bytes) in enumerate(
        itertools.product((1, 2), (1, 50_000, 100_000_000))
    ):
        if (workers, part_bytes) == (2, 1):
            continue
        folder = tmp_path / str(number)
        summary = run(
            folder, *files, tokenizer=tokenizer, workers=workers, part_bytes=part_bytes,
            append_eod=True,
        )  # fmt: skip
        assert summary.parts == {1: 24, 50_000: summary.parts, 100_000_000: 1}[part_bytes]
        made.add(read_bytes(folder / "out_text_document"))
    assert len(made) == 1
    tokens = [
        [*tokenizer.tokenize(text), tokenizer.eod]
        for i in range(2)
        for text in get_library_sources(12, seed=i)
    ]
    assert read(tmp_path / "0") == [[document] for document in tokens]


def test_there_are_no_more_workers_than_parts(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    assert run(tmp_path, path, workers=50).workers == 1


def test_existing_output_is_not_written_over(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    run(tmp_path, path)
    before = read_bytes(tmp_path / "out_text_document")
    write_json_lines(path, [{"text": "2"}])
    with pytest.raises(ConfigurationError, match=r"out_text_document.idx exist already.*--over"):
        run(tmp_path, path)
    assert read_bytes(tmp_path / "out_text_document") == before
    run(tmp_path, path, overwrite=True)
    assert read(tmp_path) == [[[2]]]


def test_an_input_without_documents_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "in.jsonl", ["{bad", {"text": ""}])
    with pytest.raises(DataError, match=r"no document that can be written \(1 empty\)") as caught:
        run(tmp_path / "new", path)
    assert "not valid JSON: 1" in str(caught.value)
    assert not list((tmp_path / "new").iterdir())


def test_end_tokens_need_a_tokenizer_that_has_one(tmp_path: Path, small_model: Path) -> None:
    tokenizer = build_tokenizer(tokenizer_name_or_path=str(small_model))
    path = write_json_lines(tmp_path / "in.jsonl", [{"text": "w1"}])
    with pytest.raises(ConfigurationError, match="no token that ends a document"):
        run(tmp_path, path, tokenizer=tokenizer, append_eod=True)


def test_the_summary_tells_everything(tmp_path: Path) -> None:
    rows = [{"text": "1 2"}, "{bad", {"text": 5}, {"text": ""}, "[1]", {"txt": "1"}, "{worse"]
    path = write_json_lines(tmp_path / "in.jsonl", rows)
    lines = format_summary(run(tmp_path, path)).splitlines()
    prefix = tmp_path / "out_text_document"
    sizes = [len(content) for content in read_bytes(prefix)]
    assert lines[:6] == [
        str(prefix),
        "  documents  1",
        "  sequences  1",
        "  tokens     2 (uint16)",
        f"  bytes      {sum(sizes)} (out_text_document.bin {sizes[0]}, "
        f"out_text_document.idx {sizes[1]})",
        "  empty      1 documents without any token, left out",
    ]
    assert lines[6].startswith("1 file, 0.0 MB of input in ")
    assert lines[7:9] == ["skipped 5 lines:", f"  not valid JSON: 2 ({path} line 2, 7)"]
    assert f"  'text' is not a string: 1 ({path} line 3)" in lines
    assert f"  not a JSON object: 1 ({path} line 5)" in lines
    assert f"  no key 'text': 1 ({path} line 6)" in lines
    assert "    the first: its keys: txt" in lines
    assert lines[-1] == f"next: rapidformer data info {prefix}"
