"""Faults planted into a run of several processes or micro-batches: ``verify`` must name each.

They leave the gradients right, or are too small to see in the weights of a few updates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.verify_table import read_table

# The rows have 1 to 6 labels, and the learning rate is so small that weight decay hardly shows.
SCRIPT = """
import torch
from torch import nn

from rapidformer import RapidformerEngine
from rapidformer.accel import dropout_seeds
from rapidformer.engine.weights import LossWeights
from rapidformer.optim import optimizers
from rapidformer.optim.update import UpdateClock


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 5)

    def forward(self, inputs, labels):
        for layer in self.layers:
            inputs = self.drop(torch.tanh(layer(inputs)))
        logits = self.head(self.norm(inputs))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        labels = torch.randint(5, (6,), generator=generator)
        labels[1 + index * 5 % 6 :] = -100
        return {"inputs": torch.randn(6, 8, generator=generator), "labels": labels}


engine = RapidformerEngine()
is_switched = engine.args.world_size > 1
FAULT
loader = engine.data.build_loader(Rows())
model, optimizer, lr_scheduler = engine.compose(Model())
AFTER
for batch in loader:
    engine.backward(model(**batch))
    engine.step()
"""
FLAGS = ("--lr", 1e-5, "--micro-batch-size", 2, "--epochs", 1, "--clip-grad", 100)
TWO = ("--nproc-per-node", 2)
ACCUMULATION = ("--nproc-per-node", 1, "--global-batch-size", 8)
BLAMED = "different: these switches change the result."


@pytest.fixture
def verify_with(verify: Any, tmp_path: Path) -> Any:
    """Verify the script with a fault in it."""

    def run(*flags: object, fault: str = "", after: str = "") -> tuple[int, str]:
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.replace("FAULT", fault).replace("AFTER", after))
        status, out, err = verify("--user-script", path, *FLAGS, *flags)
        print(out + err)
        return status, out

    run.kinds = verify.kinds
    return run


def test_without_a_fault_everything_passes(verify_with: Any) -> None:
    status, out = verify_with(*TWO, "--global-batch-size", 8)
    assert status == 0
    table = read_table(out)
    for quantity in (
        "micro-batch weights", "clipping", "learning rate", "weight decay", "dropout masks",
    ):  # fmt: skip
        assert " pass" in table[quantity]


def test_a_schedule_that_advances_with_every_micro_batch(verify_with: Any) -> None:
    """One process with accumulation: the loss must not be blamed for the cut of the batch."""
    fault = "UpdateClock.advance_schedule = lambda self, step: step()"
    status, out = verify_with(*ACCUMULATION, fault=fault)
    assert status == 3
    assert " FAIL" in (row := read_table(out)["learning rate"])
    assert "the schedule has advanced too far" in row
    assert "the schedule has advanced 3 times instead of 0. It must advance once per" in out
    assert out.strip().endswith(BLAMED)
    assert verify_with.kinds == ["switched", "whole"]


def test_clipping_that_is_left_out(verify_with: Any) -> None:
    """The norm is far below --clip-grad, so that the run itself would not clip."""
    fault = "if is_switched: UpdateClock._clip = lambda self, max_norm: None"
    status, out = verify_with(*TWO, fault=fault)
    assert status == 3
    assert " FAIL" in (row := read_table(out)["clipping"])
    assert "the gradient is not clipped" in row
    assert "Clipping is left out." in out
    assert out.strip().endswith(BLAMED)


def test_clipping_to_another_norm(verify_with: Any) -> None:
    fault = """
clip = UpdateClock._clip
if is_switched: UpdateClock._clip = lambda self, max_norm: clip(self, 2 * max_norm)
"""
    status, out = verify_with(*TWO, fault=fault)
    assert status == 3
    assert "The norm to clip to is 200 instead of 100." in out


def test_weight_decay_on_norms_and_biases(verify_with: Any) -> None:
    fault = """
def group_all(model, weight_decay):
    return [{"params": list(model.parameters()), "weight_decay": weight_decay}]
if is_switched: optimizers.group_parameters = group_all
"""
    status, out = verify_with(*TWO, fault=fault)
    assert status == 3
    table = read_table(out)
    assert " FAIL" in table["weight decay"]
    assert "decays by 0.01 instead of 0" in table["weight decay"]
    assert "has weight decay 0.01, in one process 0; 4 other parameters differ too." in out
    assert " FAIL" in table["updated weights"], "at a rate of 1e-5 too"
    assert out.strip().endswith(BLAMED)


@pytest.mark.parametrize(
    "planted",
    [
        {"fault": "dropout_seeds.seed_dropout = lambda model, seed, _: torch.manual_seed(seed)"},
        {"after": "torch.manual_seed(0)"},
    ],
    ids=["in compose", "in the script"],
)
def test_replicas_that_draw_the_same_dropout_masks(
    planted: dict[str, str], verify_with: Any
) -> None:
    status, out = verify_with(*TWO, **planted)
    assert status == 3
    assert " FAIL" in (row := read_table(out)["dropout masks"])
    assert "the same masks as rank 0" in row
    assert "ranks 0 and 1 are data-parallel replicas, but draw the same dropout masks" in out
    assert out.strip().endswith(BLAMED)


@pytest.mark.parametrize(
    ("fault", "explanation"),
    [
        (
            "add = UpdateClock.add_weight\n"
            "UpdateClock.add_weight = lambda self, weight, **named: add(self, 1.0, **named)",
            "but the gradient was divided by 4: it is a mean of means",
        ),
        (
            "LossWeights.count_labels = lambda self, micro_batch: 1.0",
            "has weight 1, but the loader counted",
        ),
        (
            "backward = RapidformerEngine.backward\n"
            "RapidformerEngine.backward = lambda self, loss: backward(self, loss, 1.0)",
            "every micro-batch has weight 1, but the loader counted",
        ),
    ],
    ids=["in the clock", "in the count", "in backward"],
)
def test_a_mean_of_means_is_not_blamed_on_the_loss(
    fault: str, explanation: str, verify_with: Any
) -> None:
    """One process that takes the same micro-batches has the fault too."""
    status, out = verify_with(*ACCUMULATION, fault=fault)
    assert status == 3
    assert explanation in out
    assert " FAIL" in read_table(out)["micro-batch weights"]
    assert "not because of the switches" not in out
    assert out.strip().endswith(BLAMED)
