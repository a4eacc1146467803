from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rapidformer.data.loader import DistributedLoader
from rapidformer.errors import ConfigurationError, DataError, ModelError
from rapidformer.tasks.registry import get_task

from .conftest import compute_metrics, make_args, run_split, train_steps, write_jsonl

MASKED, CAUSAL = get_task("masked_lm"), get_task("casual_lm")
ROWS = [{"text": "the cat sat on the mat . " * n + "hello world"} for n in (1, 3, 2, 5, 1)] + [
    {"text": "  "},
    {"text": "mary eats ."},
]


def test_masked_lm_trains_evaluates_and_predicts(bert_folder: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "test.jsonl", ROWS)
    args = make_args(pretrained_model_name_or_path=bert_folder, data_path=tmp_path, seq_length=16)
    prepared = MASKED.prepare(args)
    lengths = [len(prepared.train[i]["input_ids"]) for i in range(len(prepared.train))]
    assert lengths[:-1] == [16] * (len(lengths) - 1)
    model = MASKED.build_model(args, prepared)
    losses = train_steps(MASKED, model, prepared, steps=10)
    assert losses[-1] < losses[0]
    records = run_split(MASKED, model, prepared, "test")
    metrics = compute_metrics(MASKED, records, prepared, "test")
    batch = prepared.collate([prepared.test[i] for i in range(len(prepared.test))])
    with torch.no_grad():
        whole = model(**batch)
    marked = batch["labels"] != -100
    hits = (whole.logits.argmax(-1) == batch["labels"])[marked].float().mean()
    assert metrics["loss"] == pytest.approx(float(whole.loss), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["accuracy"] == pytest.approx(float(hits))
    assert len(MASKED.predictions(records, prepared, "test")) == len(prepared.test)

    ready = MASKED.prepare_for_prediction(args, ["the [MASK] sat on the [MASK] .", "[MASK]"])
    found = MASKED.predictions(run_split(MASKED, model, ready, "test"), ready, "test")
    assert len(found[0]["masks"]) == 2 and len(found[0]["masks"][0]) == 5
    assert "[MASK]" not in found[0]["filled"]


def test_masks_change_in_training_and_stay_in_evaluation(bert_folder: Path) -> None:
    args = make_args(pretrained_model_name_or_path=bert_folder, seq_length=16)
    first = MASKED.prepare(args, {"train": ROWS, "validation": ROWS})
    second = MASKED.prepare(args, {"validation": ROWS})
    assert list(first.validation) == list(second.validation)
    other = make_args(pretrained_model_name_or_path=bert_folder, seq_length=16, seed=-7)
    assert list(MASKED.prepare(other, {"validation": ROWS}).validation) != list(first.validation)
    rows = [first.train[i] for i in range(3)]
    torch.manual_seed(0)
    one, two = first.collate(rows), first.collate(rows)
    torch.manual_seed(0)
    again = first.collate(rows)
    assert not torch.equal(one["labels"], two["labels"])
    assert torch.equal(one["input_ids"], again["input_ids"])
    fixed = [first.validation[i] for i in range(2)]
    assert torch.equal(first.collate(fixed)["labels"], first.collate(fixed)["labels"])
    pickle.loads(pickle.dumps(first.collate))


def test_masks_do_not_depend_on_micro_batches_and_change_with_the_epoch(bert_folder: Path) -> None:
    args = make_args(pretrained_model_name_or_path=bert_folder, seq_length=16)
    prepared = MASKED.prepare(args, {"train": ROWS})

    def read(**division: Any) -> list[set[tuple[int, ...]]]:
        loader = DistributedLoader(
            prepared.train, collate=prepared.collate, shuffle=True, seed=1, **division
        )
        return [
            {tuple(row[row != -100].tolist()) for batch in loader for row in batch["labels"]}
            for _ in range(2)
        ]

    first, second = read(micro_batch_size=4)
    lengths = [len(prepared.train[i]["input_ids"]) for i in range(len(prepared.train))]
    by_tokens = {"token_budget": 20, "lengths": lengths, "rounds_per_update": 2}
    assert read(micro_batch_size=1) == read(micro_batch_size=2, **by_tokens) == [first, second]
    assert first != second


def test_masking_shares(bert_folder: Path) -> None:
    from transformers import AutoTokenizer

    from rapidformer.tasks.text.masking import mask_tokens

    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    ids = np.full((400, 50), tokenizer.convert_tokens_to_ids("cat"))
    ids[:, 0], ids[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    draws = np.random.default_rng(0).random((3, *ids.shape))
    masked, labels = mask_tokens(ids, draws, tokenizer, 0.15)
    chosen = labels != -100
    assert not chosen[:, 0].any() and not chosen[:, -1].any()
    assert chosen.any(axis=1).all()
    assert chosen.mean() == pytest.approx(0.15 * 48 / 50, abs=0.01)
    hidden = (masked == tokenizer.mask_token_id)[chosen].mean()
    assert hidden == pytest.approx(0.8, abs=0.03)
    assert (masked != ids)[~chosen].sum() == 0
    _, labels = mask_tokens(np.array([[2, 20, 3]]), np.full((3, 1, 3), 0.99), tokenizer, 0.15)
    assert (labels != -100).sum() == 1


def test_causal_lm_trains_evaluates_and_generates(gpt_folder: Path) -> None:
    args = make_args(pretrained_model_name_or_path=gpt_folder, seq_length=12, max_new_tokens=4)
    prepared = CAUSAL.prepare(args, {"train": ROWS, "validation": ROWS})
    joined = [i for k in range(len(prepared.train)) for i in prepared.train[k]["input_ids"]]
    tokenizer = prepared.processor
    texts = [r["text"] for r in ROWS if r["text"].strip()]
    wanted = [i for t in texts for i in [*tokenizer(t)["input_ids"], tokenizer.eos_token_id]]
    assert joined == wanted
    model = CAUSAL.build_model(args, prepared)
    losses = train_steps(CAUSAL, model, prepared, steps=10)
    assert losses[-1] < losses[0]
    records = run_split(CAUSAL, model, prepared, "validation", batch_size=2)
    metrics = compute_metrics(CAUSAL, records, prepared, "validation")
    rows = [prepared.validation[i] for i in range(len(prepared.validation))]
    batch = prepared.collate(rows)
    with torch.no_grad():
        whole = float(model(**batch).loss)
    assert metrics["loss"] == pytest.approx(whole, rel=1e-5)
    assert sum(r["count"] for r in records) == sum(len(r["input_ids"]) - 1 for r in rows)
    assert CAUSAL.has_shifted_labels

    ready = CAUSAL.prepare_for_prediction(args, ["the cat", "hello", ""])
    records = run_split(CAUSAL, model, ready, "test")
    found = CAUSAL.predictions(records, ready, "test")
    assert [row["text"] for row in found] == ["the cat", "hello", ""]
    assert all(len(r["generated"]) <= 4 for r in records)
    # Padding on the left leaves the result as it is alone.
    alone = CAUSAL.prepare_for_prediction(args, ["hello"])
    single = CAUSAL.predictions(run_split(CAUSAL, model, alone, "test"), alone, "test")
    assert single[0] == found[1]


def test_one_row_per_text(gpt_folder: Path) -> None:
    args = make_args(pretrained_model_name_or_path=gpt_folder, group_texts=False, seq_length=8)
    prepared = CAUSAL.prepare(args, {"train": ROWS})
    assert len(prepared.train) == 6
    assert max(len(row["input_ids"]) for row in prepared.train) == 8


def test_bad_input_is_reported(bert_folder: Path, gpt_folder: Path) -> None:
    gpt = make_args(pretrained_model_name_or_path=gpt_folder)
    with pytest.raises(ModelError, match=r"has no mask token.*--task causal_lm"):
        MASKED.prepare(gpt, {"train": ROWS})
    with pytest.raises(DataError, match=r"has no text to train on"):
        CAUSAL.prepare(gpt, {"train": [{"text": " "}]})
    with pytest.raises(DataError, match=r"the column body: name it with --text-column"):
        CAUSAL.prepare(gpt, {"train": [{"body": "x"}]})
    bert: Any = make_args(pretrained_model_name_or_path=bert_folder)
    with pytest.raises(DataError, match=r"input, row 2: there is no \[MASK\] to fill"):
        MASKED.prepare_for_prediction(bert, ["[MASK]", "hello"])
    bert.mask_prob = 1.5
    with pytest.raises(ConfigurationError, match=r"--mask-prob 1.5"):
        MASKED.prepare(bert, {"train": ROWS})


def test_generation_needs_room_for_the_prompt(gpt_folder: Path) -> None:
    args = make_args(pretrained_model_name_or_path=gpt_folder, seq_length=8, max_new_tokens=8)
    with pytest.raises(ConfigurationError, match=r"--max-new-tokens 8 leaves no room.*at most 7"):
        CAUSAL.prepare_for_prediction(args, ["the cat"])
    ready = CAUSAL.prepare_for_prediction(
        make_args(pretrained_model_name_or_path=gpt_folder, seq_length=8),
        ["the cat sat on the mat . one two three"],
    )
    # The end of the prompt is what counts.
    assert ready.processor.decode(ready.test[0]["input_ids"]) == ". one two three"
