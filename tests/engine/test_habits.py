"""Habits of users' own loops: as exact as a plain PyTorch loop, or refused with a way out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from rapidformer import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.log import get_logger, warn_once

Row = dict[str, torch.Tensor]


def make_engine(**settings: Any) -> RapidformerEngine:
    return RapidformerEngine(args={"lr": 0.1, "log_level": "error", **settings})


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make_rows(*labels: int) -> list[Row]:
    """Rows of 4 labels, of which so many count."""
    rows = []
    for number, count in enumerate(labels):
        row = torch.full((4,), -100)
        row[:count] = 1
        x = torch.randn(3, generator=torch.Generator().manual_seed(number))
        rows.append({"x": x, "labels": row})
    return rows


def compute_loss(model: nn.Module, batch: Row) -> torch.Tensor:
    """A mean over the labels that count."""
    counts = (batch["labels"] != -100).sum(1)
    loss: torch.Tensor = (model(batch["x"]).square().squeeze(1) * counts).sum() / counts.sum()
    return loss


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """What the library logs."""
    monkeypatch.setattr(get_logger(), "propagate", True)
    warn_once.cache_clear()
    caplog.set_level("INFO")
    return caplog


# ---- clipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"clip_grad": 1.0}])
def test_an_own_optimizer_is_clipped_only_if_asked(given: dict[str, float], said: Any) -> None:
    model, plain = make_model(), make_model()
    optimizer, expected = make_sgd(model), make_sgd(plain)
    engine = make_engine(log_level="info", **given)
    engine.compose(model, optimizer)
    for number in range(3):
        x = 100 * torch.randn(2, 3, generator=torch.Generator().manual_seed(number))
        engine.backward(model(x).square().mean() * 50)
        engine.step()
        (plain(x).square().mean() * 50).backward()
        if given:
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        expected.step()
        expected.zero_grad()
    assert_equal(model, plain)
    assert ("clip      gradients to norm 1.0 (--clip-grad)" in said.text) == bool(given)


def test_an_optimizer_from_the_flags_is_clipped_and_says_so(said: Any) -> None:
    model = make_model()
    engine = make_engine(log_level="info", optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0)
    engine.compose(model)
    assert "clip      gradients to norm 1.0 (--clip-grad)" in said.text
    before = [p.detach().clone() for p in model.parameters()]
    engine.backward(1000 * model(torch.ones(2, 3)).mean())
    engine.step()
    moved = [(p - old).flatten() for p, old in zip(model.parameters(), before, strict=True)]
    assert float(torch.cat(moved).detach().norm()) == pytest.approx(0.1, rel=1e-4)


def halve(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.mul_(0.5)


def halve_data(gradient: torch.Tensor) -> torch.Tensor:
    """Which no version counter tells."""
    gradient.data.mul_(0.5)
    return gradient


def treble(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 3


@pytest.mark.parametrize("change", [halve, halve_data, treble])
@pytest.mark.parametrize("make", [make_sgd, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1)])
def test_a_gradient_changed_by_hand_is_clipped_as_it_is(
    change: Callable[[torch.Tensor], torch.Tensor],
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    model, plain = make_model(), make_model()
    optimizer, expected = make(model), make(plain)
    engine = make_engine(clip_grad=0.4)
    engine.compose(model, optimizer)
    for number in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        engine.backward(model(x).square().mean())
        plain(x).square().mean().backward()
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.grad = change(parameter.grad)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.4)
        torch.testing.assert_close(engine.updates.clock.grad_norm, norm)
        engine.step()
        torch.testing.assert_close(engine.updates.clock.grad_norm, norm)
        expected.step()
        expected.zero_grad()
    assert_equal(model, plain)


# ---- while gradients are accumulated -------------------------------------------------------------


def clear_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def clear_each(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def accumulate(
    engine: RapidformerEngine, between: Callable[[nn.Module, torch.optim.Optimizer], None]
) -> nn.Module:
    """Two updates of three micro-batches, with something else in every iteration."""
    model = make_model()
    optimizer = make_sgd(model)
    engine.compose(model, optimizer)
    for number in range(6):
        between(model, optimizer)
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(number))
        engine.backward(model(x).square().mean(), weight=2)
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("last", "skipped", "expected"),
    [(2, None, [False, True] * 3), (None, 1, [False, True, True])],  # an epoch's end ends an update
)
def test_micro_batches_are_counted_whatever_the_loop_leaves_out(
    last: int | None, skipped: int | None, expected: list[bool]
) -> None:
    """Neither an epoch that is left early nor a batch that is skipped moves an update's end."""
    engine = make_engine(gradient_accumulation_steps=2)
    rows: Any = make_rows(4, 4, 4, 4)
    given = DataLoader(rows, batch_size=1)
    model, optimizer, _, loader = engine.compose(make_model(), None, train_dataloader=given)
    ends: list[bool] = []
    while len(ends) < len(expected):
        for number, batch in enumerate(loader):
            if number == skipped:
                continue
            engine.backward(compute_loss(model, batch))
            ends.append(not engine.updates.clock.is_accumulating)
            optimizer.step()
            optimizer.zero_grad()
            if number == last:
                break
    assert ends == expected


@pytest.mark.parametrize("clear", [clear_model, clear_each])
def test_clearing_in_every_iteration_waits_for_the_update(clear: Any) -> None:
    expected = accumulate(
        make_engine(gradient_accumulation_steps=3), lambda model, optimizer: optimizer.zero_grad()
    )
    assert_equal(accumulate(make_engine(gradient_accumulation_steps=3), clear), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model, _: model.zero_grad(set_to_none=False),
        lambda model, _: model(torch.ones(1, 3)).sum().backward(),
    ],
)
def test_changes_between_micro_batches_are_refused(change: Any) -> None:
    with pytest.raises(RapidformerError, match=r"Clip with engine\.clip_grad_norm\(max_norm\)"):
        accumulate(make_engine(gradient_accumulation_steps=3), change)


def test_the_ways_out_of_that_refusal_work() -> None:
    engine = make_engine(gradient_accumulation_steps=3)

    def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        engine.clip_grad_norm(1.0)
        if not engine.updates.clock.is_accumulating:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()

    accumulate(engine, clip)


class TableModel(nn.Module):
    """A table of which a batch reads a few rows, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table((x.abs() * 2).long()).mean(1))


def make_table_model() -> nn.Module:
    torch.manual_seed(0)
    return TableModel()


def test_sparse_gradients_are_accumulated_and_clipped() -> None:
    model, plain = make_table_model(), make_table_model()
    optimizer, expected = make_sgd(model), make_sgd(plain)
    engine = make_engine(gradient_accumulation_steps=2, clip_grad=0.1)
    engine.compose(model, optimizer)
    for number in range(4):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(number))
        engine.backward(model(x).square().mean(), weight=2)
        optimizer.step()
        optimizer.zero_grad()
        (plain(x).square().mean() / 2).backward()
        if number % 2:
            gradients = [p.grad.to_dense() for p in plain.parameters()]
            factor = min(1.0, 0.1 / (float(nn.utils.get_total_norm(gradients)) + 1e-6))
            for parameter in plain.parameters():
                parameter.grad = parameter.grad * factor
            expected.step()
            expected.zero_grad()
    assert_equal(model, plain)


# ---- seeds ---------------------------------------------------------------------------------------


def test_a_script_that_seeds_nothing_is_told_nothing(said: Any) -> None:
    before = torch.get_rng_state()
    torch.seed()  # what torch does itself when a process starts
    make_engine(log_level="warning").close()
    torch.set_rng_state(before)
    assert "order of shuffled data" not in said.text


def test_a_seed_of_the_script_that_nothing_follows_is_said(said: Any) -> None:
    torch.manual_seed(87)
    make_engine(log_level="warning", seed=5).close()
    assert "order of shuffled data" not in said.text
    make_engine(log_level="warning").close()  # the seed is now the engine's
    assert "order of shuffled data" not in said.text
    torch.manual_seed(88)
    make_engine(log_level="warning").close()
    assert "follow --seed, which is 1234, not the seed that the script has given torch (88)" in (
        said.text
    )


# ---- parameters that come later ------------------------------------------------------------------


def test_parameters_added_after_compose_are_divided_and_clipped_with_the_others() -> None:
    model, plain = make_model(), make_model()
    optimizer, expected = make_sgd(model), make_sgd(plain)
    engine = make_engine(gradient_accumulation_steps=2, clip_grad=0.1)
    engine.compose(model, optimizer)
    for network, its_optimizer in ((model, optimizer), (plain, expected)):
        torch.manual_seed(1)
        network[2] = nn.Linear(4, 2)
        its_optimizer.add_param_group({"params": [*network[2].parameters()], "lr": 0.3})
    for number in range(4):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(number))
        engine.backward(model(x).square().mean(), weight=2)
        optimizer.step()
        optimizer.zero_grad()
        (plain(x).square().mean() / 2).backward()
        if number % 2:
            # The layer that was replaced is still held by the optimizer, without a gradient.
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            expected.step()
            expected.zero_grad()
    assert_equal(model, plain)


# ---- which batch a loss belongs to ---------------------------------------------------------------


def fetch_ahead(loader: Any) -> Iterator[Row]:
    batches = iter(loader)
    coming = next(batches, None)
    while coming is not None:
        current, coming = coming, next(batches, None)
        yield current


def list_first(loader: Any) -> Iterator[Row]:
    yield from list(loader)


LABELS = (1, 4, 2, 2, 4, 1, 3, 1, 4, 4)
"""Two per micro-batch and two micro-batches per update: the last update has only one."""


@pytest.mark.parametrize("fetch", [iter, fetch_ahead, list_first])
@pytest.mark.parametrize("look", [lambda x: x, lambda x: x[:, :], lambda x: x.to("cpu")])
def test_a_batch_fetched_early_keeps_its_own_weight(
    fetch: Any, look: Callable[[torch.Tensor], torch.Tensor], said: Any
) -> None:
    model, plain = make_model(), make_model()
    optimizer, expected = make_sgd(model), make_sgd(plain)
    engine = make_engine(global_batch_size=4, log_level="warning")
    loader: Any = DataLoader(make_rows(*LABELS), batch_size=2)
    *_, loader = engine.compose(model, optimizer, train_dataloader=loader)
    weights = []
    for batch in fetch(loader):
        engine.backward(compute_loss(model, {**batch, "x": look(batch["x"])}))
        if not engine.updates.clock.is_accumulating:
            weights.append(float(engine.updates.clock.total_weight))
        engine.step()
    for rows in (make_rows(*LABELS)[start : start + 4] for start in (0, 4, 8)):
        whole = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        compute_loss(plain, whole).backward()
        expected.step()
        expected.zero_grad()
    assert weights == [9.0, 9.0, 8.0]
    assert_equal(model, plain)
    assert "it is unknown" not in said.text


def test_a_batch_that_cannot_be_followed_is_said(said: Any) -> None:
    model = make_model()
    engine = make_engine(global_batch_size=4, log_level="warning")
    loader: Any = DataLoader(make_rows(*LABELS), batch_size=2)
    *_, loader = engine.compose(model, make_sgd(model), train_dataloader=loader)
    for batch in fetch_ahead(loader):
        engine.backward(compute_loss(model, {**batch, "x": batch["x"] * 2}))
        engine.step()
    assert said.text.count("it is unknown which batch this loss belongs to") == 1
    assert "engine.backward(loss, weight=n)" in said.text


@pytest.mark.parametrize("is_shifted", [True, False])
def test_a_mean_over_other_labels_than_were_counted_is_said(is_shifted: bool, said: Any) -> None:
    """A decoder of one's own: nothing says that it compares each position with the next label."""
    model = nn.Linear(3, 8)
    engine = make_engine(global_batch_size=4, log_level="warning")
    loader: Any = DataLoader(make_rows(*LABELS), batch_size=2)
    *_, loader = engine.compose(model, make_sgd(model), train_dataloader=loader)
    for batch in loader:
        logits, labels = model(batch["x"]).view(-1, 4, 2), batch["labels"]
        if is_shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        engine.backward(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        engine.step()
    assert said.text.count("a mean over fewer labels than were counted") == is_shifted


@pytest.mark.parametrize(("divide", "is_said"), [("by labels", False), ("by 10", True)])
def test_a_sum_over_labels_is_said(divide: str, is_said: bool, said: Any) -> None:
    """Micro-batches are weighted by their labels, so a sum would count these twice."""
    model = nn.Linear(3, 8)
    engine = make_engine(global_batch_size=4, log_level="warning")
    loader: Any = DataLoader(make_rows(*LABELS), batch_size=2)
    *_, loader = engine.compose(model, make_sgd(model), train_dataloader=loader)
    for batch in loader:
        logits, labels = model(batch["x"]).view(-1, 2), batch["labels"].flatten()
        total = nn.functional.cross_entropy(logits, labels, reduction="sum")
        engine.backward(total / ((labels != -100).sum() if divide == "by labels" else 10))
        engine.step()
    assert ("is a sum over labels" in said.text) == is_said


def test_a_sum_over_labels_of_a_whole_update_is_not_said(said: Any) -> None:
    model = nn.Linear(3, 8)
    engine = make_engine(log_level="warning")
    loader: Any = DataLoader(make_rows(*LABELS), batch_size=2)
    *_, loader = engine.compose(model, make_sgd(model), train_dataloader=loader)
    for batch in loader:
        logits, labels = model(batch["x"]).view(-1, 2), batch["labels"].flatten()
        engine.backward(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        engine.step()
    assert "is a sum over labels" not in said.text


def test_no_batch_is_kept_alive_and_no_hook_stays() -> None:
    model = make_model()
    engine = make_engine()
    loader: Any = DataLoader(make_rows(*LABELS), batch_size=2)
    *_, loader = engine.compose(model, make_sgd(model), train_dataloader=loader)
    for batch in loader:
        engine.backward(compute_loss(model, batch))
        engine.step()
    del batch
    assert not engine.data.current._known
    assert torch.equal(copy.deepcopy(model)(torch.ones(1, 3)), model(torch.ones(1, 3)))
    engine.close()
    assert not model._forward_pre_hooks


# ---- closures ------------------------------------------------------------------------------------


def train_with_closures(
    make: Callable[[nn.Module], torch.optim.Optimizer], **settings: Any
) -> tuple[nn.Module, nn.Module, list[float], list[float]]:
    """Three steps with a closure: ours, a plain loop's, and what each step has returned."""
    model, plain = make_model(), make_model()
    optimizer, expected = make(model), make(plain)
    engine = make_engine(**settings)
    engine.compose(model, optimizer)
    ours, theirs = [], []
    for number in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))

        def compute(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            engine.backward(loss)
            return loss

        def compute_plain(x: torch.Tensor = x) -> torch.Tensor:
            expected.zero_grad()
            loss: torch.Tensor = plain(x).square().mean()
            loss.backward()
            return loss

        ours.append(float(optimizer.step(compute).detach()))  # type: ignore[arg-type]
        theirs.append(float(expected.step(compute_plain).detach()))  # type: ignore[arg-type]
    assert engine.updates.clock.updates == 3
    return model, plain, ours, theirs


@pytest.mark.parametrize(
    "make",
    [
        make_sgd,
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
        lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5),
        lambda model: torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe"),
    ],
)
def test_step_with_a_closure(make: Any) -> None:
    model, plain, ours, theirs = train_with_closures(make)
    assert_equal(model, plain)
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_a_closure_must_compute_a_whole_gradient() -> None:
    with pytest.raises(RapidformerError, match="and an update has more"):
        train_with_closures(make_sgd, gradient_accumulation_steps=2)


class SAM(torch.optim.Optimizer):
    """As its users write it: up to the worst weights nearby, and back with their gradient."""

    def __init__(self, parameters: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for parameter in every:
            move = parameter.grad * (0.05 / (norm + 1e-12))
            parameter.add_(move)
            self.state[parameter]["move"] = move
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        with torch.enable_grad():
            closure()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.sub_(self.state[parameter]["move"])
        self.base_optimizer.step()


@pytest.mark.parametrize("clip_grad", [0.0, 0.1])
def test_sams_two_gradients_per_update(clip_grad: float) -> None:
    model, plain = make_model(), make_model()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    expected = SAM(plain.parameters(), torch.optim.SGD, lr=0.1)
    engine = make_engine(clip_grad=clip_grad)
    _, _, scheduler = engine.compose(
        model, optimizer, lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    )
    plain_scheduler = torch.optim.lr_scheduler.StepLR(expected, 1, 0.5)
    for number in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))

        def compute_again(x: torch.Tensor = x) -> None:
            engine.backward(model(x).square().mean())

        def compute_plain(x: torch.Tensor = x) -> None:
            plain(x).square().mean().backward()
            if clip_grad:
                nn.utils.clip_grad_norm_(plain.parameters(), clip_grad)

        compute_again()
        optimizer.step(compute_again)
        scheduler.step()
        optimizer.zero_grad()
        compute_plain()
        expected.step(compute_plain)
        plain_scheduler.step()
        expected.zero_grad()
    assert_equal(model, plain)
    assert engine.updates.clock.updates == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)


def test_a_gradient_cleared_before_its_step_is_not_used() -> None:
    """SAM by hand: the first gradient only moves the weights."""
    model, plain = make_model(), make_model()
    optimizer, expected = make_sgd(model), make_sgd(plain)
    engine = make_engine()
    _, _, scheduler = engine.compose(model, optimizer)
    x = torch.ones(2, 3)
    engine.backward(model(x).square().mean())
    optimizer.zero_grad()
    with pytest.raises(RapidformerError, match=r"use optimizer\.step\(closure\)"):
        scheduler.step()
    engine.backward(model(x).square().mean())
    engine.step()
    plain(x).square().mean().backward()
    expected.step()
    assert_equal(model, plain)


# ---- two runs in one folder ----------------------------------------------------------------------


def train_and_save(folder: Path, updates: int, *, resumes: bool = False) -> None:
    model = make_model()
    engine = make_engine(log_level="warning")
    engine.compose(model, make_sgd(model))
    if resumes:
        engine.load_checkpoint(folder)
    for _ in range(updates):
        engine.backward(model(torch.ones(2, 3)).square().mean())
        engine.step()
        engine.save_checkpoint(folder)
    engine.close()


def list_folder(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("[a-z]*") if path.is_dir())


def test_a_second_fresh_run_keeps_its_checkpoints_apart(tmp_path: Path, said: Any) -> None:
    train_and_save(tmp_path, 3)
    train_and_save(tmp_path, 1, resumes=True)
    assert list_folder(tmp_path) == [f"iter_000000{n}" for n in (1, 2, 3, 4)]
    assert "held checkpoints" not in said.text
    train_and_save(tmp_path, 2)
    assert list_folder(tmp_path) == ["iter_0000001", "iter_0000002", "previous"]
    assert list_folder(tmp_path / "previous") == [f"iter_000000{n}" for n in (1, 2, 3, 4)]
    assert "held checkpoints of a run that this one does not continue" in said.text
    train_and_save(tmp_path, 1)
    assert list_folder(tmp_path) == ["iter_0000001", "previous", "previous-2"]
    train_and_save(tmp_path / "previous", 1, resumes=True)
    assert "iter_0000005" in list_folder(tmp_path / "previous")


def test_the_batch_is_said_at_the_start(said: Any) -> None:
    engine = make_engine(log_level="info", global_batch_size=4)
    loader: Any = DataLoader(make_rows(*LABELS), batch_size=2)
    model = make_model()
    engine.compose(model, make_sgd(model), train_dataloader=loader)
    assert "batch     4 = 2 micro x 1 data parallel x 2 accumulation" in said.text
    said.clear()
    engine = make_engine(log_level="info", micro_batch_size=3)
    engine.compose(make_model())
    engine.data.build_loader(make_rows(*LABELS))
    assert "batch     3 = 3 micro x 1 data parallel x 1 accumulation" in said.text
    assert logging.getLevelName(get_logger().level) == "INFO"


class OfEpochs(torch.utils.data.IterableDataset[float]):
    """Other rows in each epoch, for who says which one it is."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[float]:
        return iter([10.0 * self.epoch, 10.0 * self.epoch + 1])


def test_a_loop_tells_its_data_the_epoch_by_itself_or_not() -> None:
    """As with torch's DataLoader; Accelerate and the Trainer tell them, and so do the templates."""
    data, model, read = OfEpochs(), make_model(), []
    _, _, _, loader = make_engine().compose(
        model, make_sgd(model), train_dataloader=DataLoader(data, batch_size=2)
    )
    for epoch in (0, 0, 5):
        data.set_epoch(epoch)
        read += [batch.tolist() for batch in loader]
    assert read == [[0, 1], [0, 1], [50, 51]]
