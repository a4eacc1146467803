"""The losses of rows, noted while a model computes their mean, and added up by data set."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from rapidformer.accel.fused_loss.noted import Note, noting
from rapidformer.objectives.objective import Term
from rapidformer.objectives.set_losses import compute_set_losses


@pytest.mark.parametrize("kind", ["classes", "numbers", "several"])
def test_losses_are_noted_and_nothing_changes(kind: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 4, requires_grad=True)
    target: torch.Tensor = torch.tensor([1, -100, 3, 0, 2, 2])
    module: nn.Module = nn.CrossEntropyLoss()
    if kind != "classes":
        module = nn.MSELoss() if kind == "numbers" else nn.BCEWithLogitsLoss()
        target = torch.rand(6, 4)
    plain = module(logits, target)
    (wanted,) = torch.autograd.grad(plain, logits)
    with noting() as notes:
        loss = module(logits, target)
    (found,) = torch.autograd.grad(loss, logits)
    assert torch.equal(found, wanted) and loss.item() == pytest.approx(plain.item(), abs=1e-6)
    (note,) = notes
    assert (note.losses.sum() / note.counts.sum()).item() == pytest.approx(plain.item(), abs=1e-6)
    assert note.counts.tolist() == [kind != "classes" or n != 1 for n in range(6)]
    assert functional.cross_entropy.__module__ == "torch.nn.functional"


def test_sums_by_set() -> None:
    """Three rows of two tokens; the last is a filler's, which belongs to no set."""
    notes = [Note(torch.tensor([1.0, 2, 3, 0, 5, 6]), torch.tensor([1, 1, 1, 0, 1, 1]) > 0)]
    sets, names = torch.tensor([1, 0, 2]), ("a_loss", "b_loss")
    terms = {"loss": Term(torch.tensor(0.0))}
    found = compute_set_losses(terms, notes, sets, names)
    assert {n: (float(m), float(c)) for n, (m, c) in found.items()} == {
        "a_loss": (3.0, 1.0), "b_loss": (1.5, 2.0),
    }  # fmt: skip
    known = {"loss": Term.from_rows(torch.tensor([4.0, 2.0, 9.0]), torch.tensor([2, 1, 3]))}
    found = compute_set_losses(known, [], sets, names)
    assert [float(mean) for mean, _ in found.values()] == [2.0, 2.0]
    # Two terms, or losses of something else than rows: unknown, and over nothing.
    for unknown in ({**terms, "other": Term(torch.tensor(0.0))}, {"loss": terms["loss"]}):
        found = compute_set_losses(unknown, [], sets, names)
        assert [float(count) for _, count in found.values()] == [0.0, 0.0]
