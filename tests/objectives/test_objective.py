"""An objective's gradient is that of the whole update, however it is cut and spread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.data.batch import describe_batch
from rapidformer.data.update import MicroBatch, Update
from rapidformer.dist.topology import Topology
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.objectives import BoundObjective, Context, Objective, Term, Terms, take_value
from rapidformer.objectives.loss_function import LossFunction
from tests.processes import run_in_kept_processes

ROWS, WIDTH, TOKENS = 8, 6, 5


class Scores(nn.Module):
    """Scores for each token and one for each row, behind dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.words = nn.Linear(WIDTH, 4)
        self.row = nn.Linear(WIDTH, 2)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.dropout(torch.tanh(self.body(inputs)))
        return self.words(hidden), self.row(hidden.mean(1))


def build_model(dropout: float = 0.0) -> Scores:
    torch.manual_seed(0)
    return Scores(dropout).double()


def make_rows() -> list[dict[str, Tensor]]:
    """Rows with no labelled token, some and all; and one label for each row."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(ROWS):
        labels = torch.randint(0, 4, (TOKENS,), generator=generator)
        labels[number % (TOKENS + 1) :] = -100
        inputs = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        rows.append({"inputs": inputs, "labels": labels, "kind": torch.tensor(number % 2)})
    return rows


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class WordsAndRows(Objective):
    """A mean over labelled tokens, and one over rows that weighs 0.3."""

    def compute(self, model: Any, batch: Any, context: Context) -> Terms:
        words, row = model(batch["inputs"])
        labels = batch["labels"]
        total = functional.cross_entropy(words.flatten(0, 1), labels.flatten(), reduction="sum")
        return {
            "word_loss": Term.from_sum(total, (labels != -100).sum()),
            "row_loss": Term(functional.cross_entropy(row, batch["kind"]), len(row), 0.3),
            "largest": Term(row.max(), len(row), 0.0),
        }

    def count(self, micro_batch: Any) -> dict[str, float]:
        return {"word_loss": micro_batch.info.labels, "row_loss": micro_batch.info.rows}


class Pairs(Objective):
    """Tells each row from all others of the update, whichever micro-batch they are in."""

    has_first_pass = True

    def _embed(self, model: Any, batch: Any) -> Tensor:
        return functional.normalize(model(batch["inputs"])[1], dim=-1)

    def first_pass(self, model: Any, batch: Any, context: Context) -> Mapping[str, Tensor]:
        return {"vectors": self._embed(model, batch), "kind": batch["kind"]}

    def compute(self, model: Any, batch: Any, context: Context) -> Term:
        assert context.places is not None
        alive = context.rows["vectors"].index_copy(0, context.places, self._embed(model, batch))
        losses = compare(alive, context.rows["kind"])
        return Term.from_sum(
            take_value(losses[context.places].sum(), gradient_of=losses.sum()), len(batch["kind"])
        )


def compare(vectors: Tensor, kinds: Tensor) -> Tensor:
    """The loss of each row depends on every other row, and on the order of the rows."""
    ranks = torch.linspace(0.5, 1.5, len(kinds), dtype=torch.float64)
    return functional.cross_entropy(5 * vectors @ vectors.T * ranks, kinds, reduction="none")


@dataclass
class Bare:
    loss: float
    gradients: list[Tensor]


def run_bare(name: str, dropout: float = 0.0) -> Bare:
    """The same in plain PyTorch, on all rows at once."""
    model, batch = build_model(dropout), collate(make_rows())
    if name == "pairs":
        vectors = functional.normalize(model(batch["inputs"])[1], dim=-1)
        loss = compare(vectors, batch["kind"]).mean()
    else:
        words, row = model(batch["inputs"])
        word_loss = functional.cross_entropy(words.flatten(0, 1), batch["labels"].flatten())
        loss = word_loss + 0.3 * functional.cross_entropy(row, batch["kind"])
    loss.backward()
    return Bare(float(loss.detach()), [read_gradient(p) for p in model.parameters()])


def read_gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def run_engine(name: str, cut: Mapping[str, Any]) -> Bare:
    """One update through the engine; the loss is the mean over the processes, by weight."""
    objective = Pairs() if name == "pairs" else WordsAndRows()
    settings = {"global_batch_size": ROWS, "save": "none", "lr": 0.1, "clip_grad": 0.0, **cut}
    engine = RapidformerEngine(args=settings)
    loader = engine.data.build_loader(make_rows(), collate, shuffle=False, is_training=True)
    model, *_ = engine.compose(build_model())
    forward = BoundObjective(objective, model)
    update = next(engine.data.iterate_updates(loader))
    results = engine.run_update(forward, update)
    sums = torch.tensor([[float(r.loss) * float(r.weight), float(r.weight)] for r in results])
    total, weight = engine.gather(sums.sum(0)[None]).sum(0).tolist()
    return Bare(total / weight, [read_gradient(p) for p in model.parameters()])


def check_equal(result: Bare, expected: Bare) -> None:
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    scale = max(float(gradient.norm()) for gradient in expected.gradients)
    for gradient, wanted in zip(result.gradients, expected.gradients, strict=True):
        assert float((gradient - wanted).norm()) < 1e-6 * scale


@pytest.mark.parametrize("name", ["terms", "pairs"])
@pytest.mark.parametrize("size", [8, 4, 2, 1])
def test_gradient_is_that_of_one_batch(name: str, size: int) -> None:
    check_equal(run_engine(name, {"micro_batch_size": size}), run_bare(name))


@pytest.mark.parametrize("name", ["terms", "pairs"])
def test_smaller_last_micro_batch(name: str) -> None:
    cut = {"micro_batch_size": 3, "global_batch_size": 9, "keep_last": True}
    check_equal(run_engine(name, cut), run_bare(name))


def run_cuts(cuts: list[dict[str, Any]]) -> list[tuple[str, Bare]]:
    return [(name, run_engine(name, cut)) for cut in cuts for name in ("terms", "pairs")]


@pytest.mark.slow
def test_gradient_is_the_same_on_two_processes() -> None:
    """Also with a filler: 8 rows as 3 + 2 on one process, 3 and none on the other."""
    cuts = [
        {"micro_batch_size": 2},
        {"micro_batch_size": 3, "global_batch_size": 12, "keep_last": True},
    ]
    for results in run_in_kept_processes(run_cuts, 2, cuts):
        for name, result in results:
            check_equal(result, run_bare(name))


def test_filler_with_more_rows_than_the_update() -> None:
    """Its loss does not count, but it is computed with rows that exist."""
    batch = collate(make_rows())
    cuts = [({name: value[:size] for name, value in batch.items()}, size) for size in (1, 3)]
    update = Update(
        tuple(
            MicroBatch(rows, describe_batch(rows), size > 1, size > 1, 0, number)
            for number, (rows, size) in enumerate(cuts)
        )
    )
    forward = BoundObjective(Pairs(), build_model())
    for micro_batch in forward.prepare(update, Topology(), torch.device("cpu")):
        assert forward(micro_batch.batch).loss.isfinite()


def test_second_pass_draws_what_the_first_drew() -> None:
    """With dropout, both passes must see the same units, in every micro-batch."""
    engine = RapidformerEngine(args={"micro_batch_size": 2, "global_batch_size": 8, "lr": 0.1})
    loader = engine.data.build_loader(make_rows(), collate, shuffle=False, is_training=True)
    model, *_ = engine.compose(build_model(dropout=0.5))
    seen: list[Tensor] = []

    class Watching(Pairs):
        def _embed(self, model: Any, batch: Any) -> Tensor:
            vectors = super()._embed(model, batch)
            seen.append(vectors.detach())
            return vectors

    engine.run_update(BoundObjective(Watching(), model), next(engine.data.iterate_updates(loader)))
    assert len(seen) == 8
    torch.testing.assert_close(torch.cat(seen[:4]), torch.cat(seen[4:]), rtol=0, atol=0)
    assert not torch.equal(seen[0], seen[1])


class Student(Objective):
    """Follows a teacher."""

    frozen = ("teacher",)

    def compute(self, model: Any, batch: Any, context: Context) -> Term:
        with torch.no_grad():
            wanted = context.frozen["teacher"](batch["inputs"])[1]
        return Term(functional.mse_loss(model(batch["inputs"])[1], wanted), len(wanted))


def test_frozen_model_is_asked_for_by_name() -> None:
    teacher, model, batch = build_model(0.9), build_model(), collate(make_rows())
    teacher.row.weight.data += 1
    forward = BoundObjective(Student(), model, {"teacher": teacher})
    forward(batch).loss.backward()
    assert model.row.weight.grad is not None
    assert not any(p.requires_grad for p in teacher.parameters())
    assert not teacher.training
    with pytest.raises(RapidformerError, match="Student needs a frozen model as 'teacher'"):
        BoundObjective(Student(), model)


def test_terms_with_other_counts_must_be_counted() -> None:
    model, batch = build_model(), collate(make_rows())

    def compute(model: Any, batch: Any) -> Terms:
        return WordsAndRows().compute(model, batch, Context())

    forward = BoundObjective(LossFunction(compute), model)
    with pytest.raises(RapidformerError, match=r"word_loss, row_loss of LossFunction are means"):
        forward(batch)
    with torch.no_grad():
        result = forward(batch)
    assert set(result.parts) == {"word_loss", "row_loss", "largest"}
    means = forward.combine_means({"word_loss": 2.0, "row_loss": 1.0, "largest": 9.0, "loss": 0.0})
    assert means["loss"] == pytest.approx(2.3)


def test_terms_with_one_count_are_added() -> None:
    loss = torch.tensor(2.0)
    terms = {"a_loss": Term(loss, 4, 0.5), "b_loss": Term(loss * 3, 4)}
    result = BoundObjective(LossFunction(lambda model, batch: terms), None)({})
    assert (float(result.loss), result.weight) == (7.0, 4)
