"""Blocks that are replayed in prediction, without a GPU: a stand-in runs them again instead."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification

from rapidformer.accel.cuda_graph.filling import prove_filling
from rapidformer.accel.cuda_graph.forward_graphs import ForwardGraphs, ForwardModel
from rapidformer.accel.unpad.promises import reading_no_padding
from rapidformer.accel.unpad.unpadding import apply_unpadding
from rapidformer.compat.torch_modules import get_compiled_call
from rapidformer.models.plan import find_plan
from rapidformer.overlay import list_layers
from tests.training.test_block_graphs import Again
from tests.training.test_cuda_graph import make_bert


def build(model: Any, capture: Any) -> ForwardGraphs:
    blocks = find_plan(model).get_blocks(model)
    return ForwardGraphs(model, blocks, capture)


@torch.no_grad()
def test_the_same_logits_without_padding() -> None:
    model = make_bert(0.1).eval()
    ids = torch.randint(5, 60, (4, 20))
    lengths = (torch.tensor([[20, 9, 7, 3], [20, 8, 6, 5], [19, 8, 7, 6]]), torch.arange(20))
    batches = [
        {"input_ids": ids.roll(number), "attention_mask": (lengths[1] < each[:, None]).long()}
        for number, each in enumerate(lengths[0])
    ]
    expected = [model(**batch).logits for batch in batches]
    plan = find_plan(model)
    blocks = plan.get_blocks(model)
    assert apply_unpadding(model, plan, is_compiled=True) is None  # sizes are rounded up
    capture = Again()
    graphs = build(model, capture)
    with reading_no_padding():
        found = [model(**batch).logits for batch in batches]
    assert graphs.problem is None
    assert capture.recorded == 1, "both blocks as one"
    assert capture.replayed > 1
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with reading_no_padding():
        for _ in range(2):
            model(**batches[0])
    assert capture.recorded == 2, "graphs of weights that have moved since are not replayed"
    blocks[0].register_forward_hook(lambda *_: None)
    model(**batches[0])
    assert "hooks on 0" in str(graphs.problem)
    graphs.close()
    assert all(get_compiled_call(block) is None for block in blocks)


@torch.no_grad()
def test_what_blocks_have_read_is_let_go_of_after_the_last_one() -> None:
    """Otherwise, the hidden states of all blocks would last until the next evaluation."""
    model, seen = make_bert(0.1).eval(), []
    ids = torch.randint(5, 60, (4, 20))
    model.bert.embeddings.register_forward_hook(lambda *each: seen.append(weakref.ref(each[-1])))
    graphs = build(model, capture := Again())
    for passes in range(1, 4):
        model(input_ids=ids)
        assert len(seen) == passes and not any(hidden() is not None for hidden in seen)
    assert graphs.problem is None and capture.recorded == 1


@torch.no_grad()
def test_batches_with_little_padding_share_a_graph() -> None:
    model = make_bert(0.1).eval()
    batches = []
    for width in (30, 31, 32):  # sorted by length: rows of a batch have nearly the same
        mask = torch.ones(4, width, dtype=torch.long)
        mask[0, -1] = 0
        batches.append({"input_ids": torch.randint(5, 60, (4, width)), "attention_mask": mask})
    expected = [model(**batch).logits for batch in batches]
    assert apply_unpadding(model, find_plan(model), is_compiled=True) is None
    capture = Again()
    graphs = build(model, capture)
    with reading_no_padding():
        model(**batches[0])  # the first pass is not recorded
        found = [model(**batch).logits for batch in batches]
    assert graphs.problem is None
    assert capture.recorded == 1
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("counts", [[20, 9, 7, 3], [20, 20, 20, 20]])
def test_a_model_is_replayed_whole(counts: list[int]) -> None:
    model = make_bert(0.1).eval()
    plan = find_plan(model)
    blocks = plan.get_blocks(model)
    mask = (torch.arange(20) < torch.tensor(counts)[:, None]).long()
    batches = [
        {"input_ids": torch.randint(5, 60, (4, 20)), "attention_mask": mask} for _ in range(4)
    ]
    expected = [model(**batch).logits for batch in batches]
    assert apply_unpadding(model, plan) is None
    prove_filling(model, plan, None)
    capture: Any = Again()
    graphs = ForwardModel(model, blocks, capture)
    with reading_no_padding():
        found = [model(**batch).logits for batch in batches]
        assert graphs.problem is None
        assert graphs.count == capture.recorded == 1
        assert capture.replayed == 1 + len(batches) - 1, "compared once, and not used at first"
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        model.train()
        model(**batches[0])
        assert capture.replayed == len(batches)
        model.eval()
        # What it returns then is not for rows: its blocks are replayed from now on.
        model(**batches[0], output_hidden_states=True)
        assert graphs.of_blocks is not None
        assert graphs.of_blocks.problem is None
    assert "replay" not in list_layers(model)
    graphs.close()
    assert all(get_compiled_call(block) is None for block in blocks)


def test_inference_mode_and_no_grad_take_turns() -> None:
    model = make_bert(0.1).eval()
    plan = find_plan(model)
    assert apply_unpadding(model, plan) is None
    prove_filling(model, plan, None)
    capture: Any = Again()
    graphs = ForwardModel(model, plan.get_blocks(model), capture)
    batch = {"input_ids": torch.randint(5, 60, (4, 20)), "attention_mask": torch.ones(4, 20).long()}
    with reading_no_padding():
        for mode in (torch.inference_mode, torch.no_grad) * 2:
            with mode():
                found = [model(**batch).logits for _ in range(3)]
            for logits in found[1:]:
                torch.testing.assert_close(logits, found[0], rtol=1e-4, atol=1e-5)
    assert graphs.problem is None
    assert graphs.count == 2


class Wide(BertForSequenceClassification):
    """Returns something of the width of its batch."""

    def forward(self, input_ids: Any, **more: Any) -> Any:
        output = super().forward(input_ids=input_ids, **more)
        output.logits = output.logits + input_ids.ne(0).float().mean()
        return output


@torch.no_grad()
def test_a_models_own_code_sees_the_width_of_its_batches() -> None:
    model = make_bert(0.1).eval()
    model.__class__ = Wide
    plan = find_plan(model)
    batches = [
        {"input_ids": torch.randint(5, 60, (4, w)), "attention_mask": torch.ones(4, w).long()}
        for w in (20, 30, 20, 30, 20)
    ]
    expected = [model(**batch).logits for batch in batches]
    apply_unpadding(model, plan)
    prove_filling(model, plan, None)
    capture: Any = Again()
    graphs = ForwardModel(model, plan.get_blocks(model), capture)
    with reading_no_padding():
        for batch, theirs in zip(batches, expected, strict=True):
            torch.testing.assert_close(model(**batch).logits, theirs, rtol=1e-4, atol=1e-5)
    graphs.close()


def test_training_runs_as_it_is() -> None:
    model = make_bert(0.0)
    capture = Again()
    build(model, capture)
    for _ in range(3):
        model(input_ids=torch.ones(2, 5, dtype=torch.long)).logits.sum().backward()
    assert capture.recorded == 0
    assert pytest.approx(0.0) != float(model.classifier.weight.grad.norm())
