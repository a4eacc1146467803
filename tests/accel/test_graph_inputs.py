"""Batches at fixed places in memory (``--cuda-graph``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from rapidformer.accel.cuda_graph.columns import Filling
from rapidformer.accel.cuda_graph.inputs import StaticInputs, read_inputs
from rapidformer.accel.unpad.calls import Removal
from rapidformer.overlay import put_fact


def make_batch(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(9, (2, 3), generator=draw),
        "mask": torch.rand(5, generator=draw) > 0.5,
        "weight": torch.rand((), generator=draw),
        "none": torch.empty(0, 4),
        "half": torch.rand(3, generator=draw).bfloat16(),
        "nested": [torch.rand(2, 2, generator=draw).double(), {"kind": "text"}],
    }


def list_tensors(batch: dict[str, Any]) -> list[torch.Tensor]:
    *plain, nested = batch.values()
    return [*plain, nested[0]]


def place(batch: Any) -> StaticInputs:
    inputs = read_inputs(nn.Linear(1, 1), batch)
    assert inputs is not None
    return StaticInputs(inputs, torch.device("cpu"))


def test_a_batch_of_any_types_is_filled_in_place() -> None:
    """Types that NumPy does not have, other kinds of tensors and empty ones included."""
    first, second = make_batch(0), make_batch(1)
    static = place(first)
    placed = list_tensors(static.batch)
    assert {tensor.storage_offset() for tensor in placed} == {0}, "compiled blocks look at that"
    assert static.batch["nested"][1] == {"kind": "text"}
    inputs = read_inputs(nn.Linear(1, 1), second)
    assert inputs is not None
    for expected in (first, second):
        for mine, theirs in zip(placed, list_tensors(expected), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        static.fill(inputs)


def test_a_step_may_change_one_of_its_inputs() -> None:
    """Although they are in one piece of memory, autograd tells their changes apart."""
    table = nn.Embedding(9, 2)
    batch = place({"ids": torch.tensor([1, 2]), "labels": torch.tensor([1.0, 0.0])}).batch
    hidden = table(batch["ids"]).sum(-1)
    batch["labels"].mul_(2)
    (hidden * batch["labels"]).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.sum(1).tolist() == [0.0, 4.0, *[0.0] * 7]


@pytest.mark.parametrize(
    ("lengths", "pads_attention", "width"),
    [
        ([300, 9], False, 512), ([300, 9], True, 384), ([320, 320], False, 0),
        ([300, 300], False, 512), ([320], False, 512),
    ],
    ids=["unpadded", "attention is padded", "rows of one length", "by chance", "one row"],
)  # fmt: skip
def test_batches_get_one_of_a_few_widths(
    lengths: list[int], pads_attention: bool, width: int
) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1))
    put_fact(model, Filling(fills=True, widens=False))
    put_fact(model, Removal(pads_attention=pads_attention))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    batch = {"input_ids": mask, "attention_mask": mask, "labels": mask.masked_fill(mask == 0, -100)}
    inputs = read_inputs(model, batch)
    assert inputs is not None
    assert inputs.sizes.columns == width


@pytest.mark.parametrize(
    ("case", "width", "is_unpadded"),
    [("padded", 256, True), ("full", 192, False), ("gap", 192, False), ("no value", 256, True)],
)
def test_both_sides_get_widths_for_how_they_run(case: str, width: int, is_unpadded: bool) -> None:
    """Padding is only added if it is not computed."""
    sizes: dict[str, Any] = {"d_model": 4, "d_kv": 4, "d_ff": 4, "num_layers": 1, "num_heads": 1}
    model = T5ForConditionalGeneration(T5Config(vocab_size=9, decoder_start_token_id=0, **sizes))
    put_fact(model, Filling(fills=True, widens=True))
    put_fact(model, Removal(only_in_graphs=True))
    mask = (torch.arange(192) < torch.tensor([192, 60 if case != "full" else 192])[:, None]).long()
    if case == "gap":
        mask[1, 4] = 0
    batch: Any = {
        "input_ids": mask,
        "attention_mask": mask,
        "labels": mask.masked_fill(mask == 0, -100),
    }
    if case == "no value":
        batch["decoder_attention_mask"] = None
    inputs = read_inputs(model, batch)
    assert inputs is not None
    assert inputs.sizes.columns == inputs.sizes.labels == width
    assert (inputs.rows is not None) == is_unpadded
