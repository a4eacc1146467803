"""What ``--cuda-graph auto`` finds in a user's forward step that a replay would leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer.accel.cuda_graph.side_effects import Examination

SEEN: list[float] = []
SCALE = 2.0


def smooth(loss: Any) -> Any:
    return loss * SCALE


def remember(loss: Any) -> Any:
    SEEN.append(loss)
    return loss


class Steps:
    factor = 0.5

    def __init__(self) -> None:
        self.steps = 0
        self.criterion = nn.CrossEntropyLoss()
        self.history: list[Any] = []

    def plain(self, batch: Any, model: Any) -> Any:
        labels = batch.pop("labels")
        outputs = model(**batch)
        loss = functional.cross_entropy(outputs.logits, labels) + self.criterion(outputs[0], labels)
        return smooth(loss) * self.factor, len(labels), {"loss": loss.detach()}

    def from_iterator(self, data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        with torch.no_grad():
            weight = torch.ones(2)
        return sum(model(batch[name]) for name in sorted(batch)), weight

    def counts(self, batch: Any, model: Any) -> Any:
        self.steps += 1
        return model(**batch).loss

    def prints(self, batch: Any, model: Any) -> Any:
        print(batch)
        return model(**batch).loss

    def keeps(self, batch: Any, model: Any) -> Any:
        loss = model(**batch).loss
        self.history.append(loss)
        return loss

    def calls(self, batch: Any, model: Any) -> Any:
        return remember(model(**batch).loss)

    def marks(self, batch: Any, model: Any) -> Any:
        model.is_marked = True
        return model(**batch).loss


class Criterion(nn.Module):
    def __init__(self, weight: Any = None) -> None:
        super().__init__()
        self.calls, self.weight = 0, weight

    def forward(self, logits: Any) -> Any:
        self.calls += 1
        return logits.mean()


class Losses:
    """Steps with modules and tensors that are not part of the model."""

    def __init__(self) -> None:
        self.counting, self.head = Criterion(), nn.Linear(1, 1)
        self.temperature = nn.Parameter(torch.ones(()))
        self.center = torch.zeros(())

    def count(self, batch: Any, model: Any) -> Any:
        return self.counting(model(**batch).logits)

    def train_head(self, batch: Any, model: Any) -> Any:
        return self.head(model(**batch).logits).mean()

    def train_number(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss * self.temperature

    def move_center(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss - self.center.mul_(0.9)


class Child(Steps):
    def plain(self, batch: Any, model: Any) -> Any:
        return super().plain(batch, model)


def remember_calls(batch: Any, model: Any, calls: list[Any] = []) -> Any:  # noqa: B006
    calls.append(batch)
    return model(**batch).loss


def make_closure(watch: Any) -> Any:
    def step(batch: Any, model: Any) -> Any:
        watch.begin()
        return model(**batch).loss

    return step


def examine(step: Any) -> Examination:
    return Examination([step], nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["plain", "from_iterator"])
def test_a_step_that_only_computes(name: str) -> None:
    assert examine(getattr(Steps(), name)).effect is None
    assert examine(getattr(Child(), name)).effect is None


def test_values_outside_the_code_are_known() -> None:
    steps = Steps()
    found = examine(steps.plain)
    assert found.read_values() == ((0.5, SCALE), ())
    steps.factor = 0.25
    assert found.read_values() == ((0.25, SCALE), ())


@pytest.mark.parametrize(
    ("step", "effect"),
    [
        (Steps().counts, "changes self.steps"),
        (Steps().prints, "uses print"),
        (Steps().keeps, "uses self.history"),
        (Steps().calls, "uses SEEN"),
        (Steps().marks, "changes model.is_marked"),
        (make_closure(object()), "uses watch"),
        (remember_calls, "has a default argument that may change"),
        (Losses().count, "Losses.count changes self.calls"),
        (Losses().train_head, "uses a Linear with trainable weights outside the model"),
        (Losses().train_number, "uses self.temperature, a trainable weight outside the model"),
        (eval("lambda batch: batch"), "has no source code to check"),
    ],
)
def test_a_step_that_does_more(step: Any, effect: str) -> None:
    assert str(examine(step).effect).endswith(effect)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_model_of_your_own() -> None:
    assert Examination([], nn.Sequential(nn.Linear(2, 2))).effect is None
    found = Examination([], nn.Sequential(Counting(2, 2)))
    assert found.effect == "Counting.forward changes self.calls"


class Measuring(nn.Linear):
    def compute_loss(self, batch: Any) -> Any:
        print(batch)
        return self(batch).mean()


def compute(batch: Any, model: Any) -> Any:
    return model.compute_loss(batch)


def test_a_method_of_the_model() -> None:
    assert Examination([compute], nn.Linear(2, 2)).effect is None
    assert Examination([compute], Measuring(2, 2)).effect == "compute uses print"


class Block(nn.Module):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_every_block_has_its_own_numbers() -> None:
    model = nn.Sequential(Block(), Block())
    found = Examination([], model)
    before = found.read_values()
    model[0].scale = 2.0
    assert found.read_values() != before


def test_numbers_of_a_librarys_modules() -> None:
    """A callback may change how attention is scaled, for example."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=4, n_layer=1, n_head=1, n_positions=4))
    found = Examination([], model)
    before = found.read_values()
    model.transformer.h[0].attn.scaling = 0.125
    assert found.effect is None
    assert found.read_values() != before


def test_a_forward_of_one_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].forward = Steps().prints
    assert Examination([], model).effect == "Steps.prints uses print"


def test_tensors_that_a_step_may_change() -> None:
    model, losses = nn.BatchNorm1d(1), Losses()
    found = Examination([losses.move_center], model)
    assert found.effect is None
    tensors = found.list_tensors()
    assert len(tensors) == 4
    assert any(tensor is losses.center for tensor in tensors)
