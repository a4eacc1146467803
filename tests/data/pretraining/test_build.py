"""From prefixes to data sets: splits, blends, prefixes of their own, the cache, the settings."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import BertTokenizerFast

import rapidformer
from rapidformer import context
from rapidformer.config import Settings
from rapidformer.data import pretraining
from rapidformer.data.indexed import IndexedDataError, open_indexed
from rapidformer.data.pretraining.assemble import build_datasets
from rapidformer.data.pretraining.blend import BlendedDataset
from rapidformer.data.tokenizers import Tokenizer
from rapidformer.errors import ConfigurationError, DataError, RapidformerError

from .references import blend_slowly
from .rig import make_documents, make_tokenizer, write_corpus


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return [
        write_corpus(tmp_path / f"corpus{seed}_text_sentence", make_documents(30, seed=seed))
        for seed in range(2)
    ]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(tmp_path)


def build(objective: str = "gpt", **changed: Any) -> Any:
    values = {
        "train_valid_test_num_samples": (40, 10, 5), "seq_length": 16, "seed": 1234,
        "splits_string": "8,1,1",
    }  # fmt: skip
    return build_datasets(objective, **(values | changed))


def list_texts(dataset: Any) -> list[list[int]]:
    return [sample["text"].tolist() for sample in dataset]


def count_maps(folder: Path) -> int:
    return len(list((folder / "index-cache").glob("*.json")))


# --- one prefix ----------------------------------------------------------------------------------


def test_public_names_are_the_builders() -> None:
    for name in pretraining.__all__:
        assert callable(getattr(pretraining, name))
    assert (
        pretraining.build_pretrain_huggingface_bert_datasets
        is pretraining.build_train_valid_test_datasets_for_huggingface
        is rapidformer.build_train_valid_test_datasets_for_huggingface
    )


def test_a_prefix_may_be_a_string_a_path_or_a_list(prefixes: list[str]) -> None:
    expected = list_texts(build(data_prefix=prefixes[0])[0])
    assert list_texts(build(data_prefix=Path(prefixes[0]))[0]) == expected
    assert list_texts(build(data_prefix=[prefixes[0]])[0]) == expected


def test_bert_splits_documents(prefixes: list[str], tokenizer: Tokenizer) -> None:
    data = open_indexed(prefixes[0])
    datasets = build("bert", data_prefix=prefixes[0], tokenizer=tokenizer, splits_string="8,1,1")
    for dataset, (start, stop) in zip(datasets, [(0, 24), (24, 27), (27, 30)], strict=True):
        rows = dataset.maps["rows"]
        assert rows[:, 0].min() >= data.doc_idx[start]
        assert rows[:, 1].max() <= data.doc_idx[stop]


def test_an_empty_split_and_one_that_nobody_wants_are_none(prefixes: list[str]) -> None:
    assert build(data_prefix=prefixes[0], splits_string="980,20")[2] is None
    train, valid, test = build(data_prefix=prefixes[0], train_valid_test_num_samples=[3, 0, None])
    assert len(train) >= 3
    assert valid is None
    assert len(test) > 0


# --- the cache -----------------------------------------------------------------------------------


def test_maps_are_found_again_and_follow_the_content_of_the_data(
    tmp_path: Path, prefixes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = list_texts(build(data_prefix=prefixes[0])[0])
    assert count_maps(tmp_path) == 3
    moved = tmp_path / "moved"
    for ending in (".bin", ".idx"):
        shutil.copy(prefixes[0] + ending, f"{moved}{ending}")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="rapidformer"):
        assert list_texts(build(data_prefix=str(moved))[0]) == first
    assert "built the index map" not in caplog.text
    for ending in (".bin", ".idx"):
        shutil.copy(prefixes[1] + ending, f"{moved}{ending}")
    assert list_texts(build(data_prefix=str(moved))[0]) != first
    assert count_maps(tmp_path) == 6


@pytest.mark.parametrize(
    "changed",
    [{"seed": 1}, {"seq_length": 15}, {"train_valid_test_num_samples": (41, 10, 5)}],
)
def test_other_settings_have_other_maps(
    tmp_path: Path, prefixes: list[str], changed: dict[str, Any]
) -> None:
    build(data_prefix=prefixes[0])
    build(data_prefix=prefixes[0], **changed)
    assert count_maps(tmp_path) > 3


def test_maps_go_to_the_chosen_folder(tmp_path: Path, prefixes: list[str]) -> None:
    build(data_prefix=prefixes[0], data_cache_path=tmp_path / "chosen")
    assert count_maps(tmp_path / "chosen") == 3
    assert not (tmp_path / "index-cache").exists()


# --- blends and prefixes of their own ------------------------------------------------------------


def test_a_blend_takes_from_each_by_its_weight(prefixes: list[str]) -> None:
    words = ["0.7", prefixes[0], "0.3", prefixes[1]]
    blended = build(data_prefix=words)
    for number, (dataset, count) in enumerate(zip(blended, (40, 10, 5), strict=True)):
        assert isinstance(dataset, BlendedDataset)
        assert len(dataset) == count
        shares = [int(np.ceil(count * weight * 1.005)) for weight in (0.7, 0.3)]
        alone = [
            build(data_prefix=prefix, train_valid_test_num_samples=[share] * 3)[number]
            for prefix, share in zip(prefixes, shares, strict=True)
        ]
        expected = [
            alone[which][sample]["text"].tolist()
            for which, sample in blend_slowly([0.7, 0.3], count)
        ]
        assert list_texts(dataset) == expected


def test_a_blend_leaves_out_what_has_nothing_in_a_split(
    tmp_path: Path, prefixes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    tiny = write_corpus(tmp_path / "tiny", [[[7] * 40]] * 3)
    with caplog.at_level(logging.WARNING, logger="rapidformer"):
        train, valid, test = build(data_prefix=["1", tiny, "1", prefixes[0]], splits_string="9,1")
    assert len(train.datasets) == 2
    assert (len(valid.datasets), len(valid)) == (1, 10)
    assert test is None
    assert f"valid: {tiny} has no documents in this split and is left out" in caplog.text


def test_prefixes_of_their_own_are_not_split(prefixes: list[str]) -> None:
    train, valid, test = build(
        train_data_prefix=prefixes[0],
        valid_data_prefix=["0.5", prefixes[0], "0.5", prefixes[1]],
        train_valid_test_num_samples=(None, 6, 6),
    )
    assert len(train) == (open_indexed(prefixes[0]).num_tokens - 1) // 16
    assert (len(valid), test) == (6, None)


def test_contradicting_and_missing_data_are_refused(prefixes: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="give either the one or the others"):
        build(data_prefix=prefixes[0], valid_data_prefix=prefixes[1])
    with pytest.raises(ConfigurationError, match="there is no data"):
        build()
    with pytest.raises(ConfigurationError, match="--train-data-path has 3 items"):
        build(train_data_prefix=["1", prefixes[0], "2"])
    with pytest.raises(ConfigurationError, match="--split 'all'"):
        build(data_prefix=prefixes[0], splits_string="all")
    with pytest.raises(ConfigurationError, match="--data-path needs --split"):
        build(data_prefix=prefixes[0], splits_string=None)
    with pytest.raises(IndexedDataError, match="nowhere"):
        build(data_prefix="nowhere")
    with pytest.raises(DataError, match="a blend has no natural end"):
        build(
            data_prefix=["1", prefixes[0], "1", prefixes[1]],
            train_valid_test_num_samples=[None] * 3,
        )


def test_bad_settings_are_reported_all_at_once(prefixes: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build(
            data_prefix=prefixes[0], seq_length=0, seed=-1, masked_lm_prob=1.5, short_seq_prob=-1,
            train_valid_test_num_samples=(1, -2),
        )  # fmt: skip
    for reason in (
        "has 2 numbers, three are needed", "-2 samples is negative", "--seq-length 0",
        "--seed -1", "--mask-prob 1.5", "--short-seq-prob -1",
    ):  # fmt: skip
        assert reason in str(caught.value)
    with pytest.raises(ConfigurationError, match="'xlnet' is not one of gpt, bert and t5"):
        build("xlnet", data_prefix=prefixes[0])


# --- tokenizers and settings ---------------------------------------------------------------------


def test_the_runs_tokenizer_is_taken_where_none_is_given(
    prefixes: list[str], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = build("bert", data_prefix=prefixes[0], tokenizer=tokenizer)[0][3]
    monkeypatch.setattr(context, "get_tokenizer", lambda: tokenizer)
    found = build("bert", data_prefix=prefixes[0])[0][3]
    assert found["input_ids"].tolist() == given["input_ids"].tolist()


def test_without_a_run_a_tokenizer_is_asked_for(
    prefixes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_current", type(context._current)())
    with pytest.raises(RapidformerError, match="RapidformerEngine"):
        build("bert", data_prefix=prefixes[0])


def test_a_tokenizer_of_transformers_will_do(
    tmp_path: Path, prefixes: list[str], tokenizer: Tokenizer
) -> None:
    theirs = BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))
    ours = build("bert", data_prefix=prefixes[0], tokenizer=tokenizer)[0]
    with_theirs = build("bert", data_prefix=prefixes[0], tokenizer=theirs)[0]
    for index in range(10):
        assert with_theirs[index]["input_ids"].tolist() == ours[index]["input_ids"].tolist()


def test_the_settings_of_a_run_name_its_data(prefixes: list[str], tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, sentinels=10)
    args = SimpleNamespace(
        **{
            name: getattr(Settings(), name)
            for name in (
                "train_data_path", "valid_data_path", "test_data_path", "data_impl", "mask_prob",
                "short_seq_prob", "seed", "mmap_warmup", "data_cache_path",
                "decoder_seq_length",
            )
        },
        data_path=prefixes[0],
        split="8,1,1",
        seq_length=16,
    )  # fmt: skip
    counts = [20, 5, 0]
    train, valid, test = pretraining.build_pretraining_datasets("gpt", args, counts)  # type: ignore[arg-type]
    assert list_texts(valid) == list_texts(
        build(data_prefix=prefixes[0], train_valid_test_num_samples=counts)[1]
    )
    assert (len(train) >= 20, test) == (True, None)
    spans, _, _ = pretraining.build_pretraining_datasets(
        "t5",
        args,
        counts,
        tokenizer=tokenizer,  # type: ignore[arg-type]
    )
    assert spans[0]["labels"].shape == (128,)
    args.seq_length = None
    with pytest.raises(ConfigurationError, match="needs --seq-length"):
        pretraining.build_pretraining_datasets("gpt", args, counts)  # type: ignore[arg-type]
