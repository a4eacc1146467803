"""T5 samples: equal to a plain reference, and spans that can be put back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from torch.utils.data import default_collate
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from rapidformer.data.indexed import open_indexed
from rapidformer.data.pretraining.assemble import build_datasets
from rapidformer.data.pretraining.sentence_samples import T5Dataset, T5Tokens
from rapidformer.data.tokenizers import Tokenizer
from rapidformer.errors import ConfigurationError

from .references import make_t5_slowly
from .rig import make_documents, make_tokenizer, write_corpus

LENGTH, LENGTH_DEC = 64, 80


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), sentinels=50)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    return write_corpus(folder / "corpus_text_sentence", make_documents(60))


def make_dataset(data: Any, rows: Any, tokenizer: Tokenizer, **changed: Any) -> T5Dataset:
    values = {
        "max_seq_length": LENGTH, "max_seq_length_dec": LENGTH_DEC, "masked_lm_prob": 0.15,
        "seed": 1234,
    } | changed  # fmt: skip
    maps = {"rows": np.array(rows, dtype=np.uint32)}
    return T5Dataset(data, maps, T5Tokens.of(tokenizer), **values)


def build(prefix: str, tokenizer: Any) -> Any:
    train, _, _ = build_datasets(
        "t5", data_prefix=prefix, splits_string="1", train_valid_test_num_samples=[50, 0, 0],
        seq_length=LENGTH, seq_length_dec=LENGTH_DEC, seed=1234, tokenizer=tokenizer,
    )  # fmt: skip
    return train


def make_rows(count: int) -> list[tuple[int, int, int]]:
    random = np.random.default_rng(0)
    return [
        (start, start + int(random.integers(1, 14)), int(random.integers(2, LENGTH - 1)))
        for start in random.integers(0, 180, count).tolist()
    ]


@pytest.mark.parametrize("mask_prob", [0.15, 0.5])
def test_samples_are_those_drawn_one_number_at_a_time(
    prefix: str, tokenizer: Tokenizer, mask_prob: float
) -> None:
    data, rows = open_indexed(prefix), make_rows(60)
    dataset = make_dataset(data, rows, tokenizer, masked_lm_prob=mask_prob)
    for index, (start, end, target) in enumerate(rows):
        expected = make_t5_slowly(
            [sentence.tolist() for sentence in data[start:end]],
            target,
            tokenizer,
            length=LENGTH,
            length_dec=LENGTH_DEC,
            mask_prob=mask_prob,
            seed=1234 + index,
        )
        sample = dataset[index]
        assert list(sample) == list(expected)
        for key, value in expected.items():
            assert np.asarray(sample[key]).tolist() == np.asarray(value).tolist(), (index, key)
            assert np.asarray(sample[key]).dtype == np.int64


def put_back(text: list[int], answer: list[int], sentinels: list[int]) -> list[int]:
    spans: dict[int, list[int]] = {}
    for token in answer:
        if token in sentinels:
            spans[token] = last = []
        else:
            last.append(token)
    return [piece for token in text for piece in spans.get(token, [token])]


def test_spans_can_be_put_back(prefix: str, tokenizer: Tokenizer) -> None:
    data, rows = open_indexed(prefix), make_rows(100)
    dataset = make_dataset(data, rows, tokenizer)
    sentinels = tokenizer.additional_special_tokens_ids
    for index, (start, end, target) in enumerate(rows):
        whole = [token for sentence in data[start:end] for token in sentence.tolist()][:target]
        sample = dataset[index]
        text = sample["input_ids"][: sample["attention_mask"].sum()].tolist()
        answer = sample["labels"][sample["labels"] != -100].tolist()
        assert text.pop() == answer.pop() == tokenizer.eos
        assert (sample["input_ids"][len(text) + 1 :] == tokenizer.pad).all()
        used = [token for token in text if token in sentinels]
        assert used == sentinels[: len(used)]
        assert put_back(text, answer, sentinels) == whole
        assert len(answer) - len(used) <= min(0.15 * target, max(1, round(0.15 * len(whole))))


@pytest.mark.parametrize(("length_dec", "num_sentinels"), [(8, 50), (80, 2), (3, 50)])
def test_spans_that_find_no_room_stay_in_the_text(
    prefix: str, tokenizer: Tokenizer, length_dec: int, num_sentinels: int
) -> None:
    data, rows = open_indexed(prefix), [(start, start + 14, LENGTH - 2) for start in range(60)]
    tokens = T5Tokens.of(tokenizer)
    tokens = tokens._replace(sentinels=tokens.sentinels[:num_sentinels])
    dataset = T5Dataset(
        data, {"rows": np.array(rows, dtype=np.uint32)}, tokens, max_seq_length=LENGTH,
        max_seq_length_dec=length_dec, masked_lm_prob=0.3, seed=1,
    )  # fmt: skip
    counts = set()
    for index, (start, end, target) in enumerate(rows):
        whole = [token for sentence in data[start:end] for token in sentence.tolist()][:target]
        sample = dataset[index]
        text = sample["input_ids"][: sample["attention_mask"].sum()].tolist()[:-1]
        answer = sample["labels"][sample["labels"] != -100].tolist()
        assert answer.pop() == tokenizer.eos
        assert put_back(text, answer, tokens.sentinels) == whole
        counts.add(sum(token in tokens.sentinels for token in text))
    assert max(counts) <= min(num_sentinels, (length_dec - 1) // 2)
    assert max(counts) > 0


def test_nothing_hidden_leaves_an_empty_answer(prefix: str, tokenizer: Tokenizer) -> None:
    sample = make_dataset(open_indexed(prefix), [(0, 3, 60)], tokenizer, masked_lm_prob=0.0)[0]
    assert sample["labels"][:2].tolist() == [tokenizer.eos, -100]


def test_huggingface_t5_reads_them_by_its_own_convention(prefix: str, tokenizer: Tokenizer) -> None:
    """Its shifted labels are the decoder input, after its own start."""
    ours = build(prefix, tokenizer)
    batch = default_collate([ours[i] for i in range(6)])
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=tokenizer.vocab_size, d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4,
            pad_token_id=tokenizer.pad, eos_token_id=tokenizer.eos,
            decoder_start_token_id=tokenizer.pad,
        )
    )  # fmt: skip
    decoder_input = model._shift_right(batch["labels"])
    is_real = batch["labels"][:, :-1] != -100
    assert torch.equal(decoder_input[:, 1:][is_real], batch["labels"][:, :-1][is_real])
    assert (decoder_input[:, 0] == tokenizer.pad).all()
    assert torch.isfinite(model(**batch).loss)


def test_a_t5_tokenizer_needs_no_bert_tokens(prefix: str) -> None:
    vocabulary = {"<pad>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 207)}, "<extra_id_0>": 207}
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Backend(WordLevel(vocabulary)), pad_token="<pad>", eos_token="</s>"
    )
    sample = build(prefix, theirs)[0]
    assert (sample["input_ids"] == 207).sum() == 1
    assert sample["labels"][0] == 207


def test_a_tokenizer_without_sentinels_is_refused(prefix: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"no sentinels .* --vocab-extra-ids 100"):
        T5Tokens.of(make_tokenizer(tmp_path))


def test_a_decoder_without_room_for_an_answer_is_refused(prefix: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigurationError, match="length 2 cannot hold an answer: at least 3"):
        make_dataset(open_indexed(prefix), [(0, 3, 60)], tokenizer, max_seq_length_dec=2)
