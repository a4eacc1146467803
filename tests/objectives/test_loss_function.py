"""What ``run_forward_step`` may return, and how the weight of its loss is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapidformer.errors import RapidformerError
from rapidformer.objectives import Term
from rapidformer.objectives.loss_function import SingleBatch, read_terms

LOSS = torch.tensor(1.5)


@pytest.mark.parametrize(
    ("returned", "loss", "weight"),
    [
        (LOSS, 1.5, None),
        ((LOSS, 3), 1.5, 3),
        ((LOSS, torch.tensor(4)), 1.5, 4),
        ({"loss": LOSS, "logits": torch.zeros(2)}, 1.5, None),
        ((torch.tensor([1.0, 3.0]), lambda output: (output.mean(), {"lm loss": 2.0})), 2.0, None),
        ((torch.tensor([1.0, 3.0]), lambda output: output.sum()), 4.0, None),
    ],
    ids=["loss", "loss and count", "loss and tensor", "dict", "Megatron", "Megatron, loss alone"],
)
def test_forms(returned: Any, loss: float, weight: float | None) -> None:
    term = read_terms(returned)["loss"]
    assert term.mean.item() == loss
    assert term.count == weight


def test_hugging_faces_output_is_a_dict_with_a_loss() -> None:
    from transformers.modeling_outputs import CausalLMOutput

    terms = read_terms(CausalLMOutput(loss=LOSS, logits=torch.zeros(1)))
    assert terms["loss"].mean is LOSS


def test_gradient_flows_through() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    read_terms({"loss": weight * 3})["loss"].mean.backward()
    assert weight.grad == 3


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "must return the loss, a tensor, got NoneType"),
        (1.5, "must return the loss, a tensor, got float"),
        ({"logits": LOSS}, "must return the loss, a tensor, got NoneType"),
        (torch.zeros(2, 3), r"must return one number, got a tensor of shape \[2, 3\]"),
        ((1.5, 2), "must return the loss, a tensor, got float"),
        ((LOSS, LOSS, LOSS), "must return the loss, a tensor, got tuple"),
    ],
    ids=["nothing", "float", "dict without a loss", "many numbers", "float and count", "three"],
)
def test_other_forms_are_explained(returned: Any, text: str) -> None:
    with pytest.raises(RapidformerError, match=f"run_forward_step {text}"):
        read_terms(returned)


def test_iterator_of_a_step_has_one_batch() -> None:
    batches = SingleBatch({"a": 1})
    assert iter(batches) is batches
    assert next(batches) == {"a": 1}
    with pytest.raises(RapidformerError, match="took a second batch"):
        next(batches)


def test_parts_of_a_loss_are_kept_by_name() -> None:
    """Megatron's loss functions name what they average; a hook may do so as well."""
    parts = {"lm loss": LOSS * 2, "text": "no number", "many": torch.zeros(3), "sop": (LOSS, 2)}
    forms = (((LOSS, 4, parts), 4), ((LOSS, lambda output: (output, parts)), None))
    for returned, weight in forms:
        terms = dict(read_terms(returned))
        assert terms.pop("loss") == Term(LOSS, weight)
        assert terms == {"lm_loss": Term(LOSS * 2, weight, 0.0), "sop": Term(LOSS, 2, 0.0)}
    assert list(read_terms(LOSS)) == ["loss"]
