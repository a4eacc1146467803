"""Carry a run from layout to layout, and compare it with one that was never interrupted.

A *leg* loads a checkpoint, saves it again at once, trains two steps, and saves the result. The copy
must equal what was loaded, bit for bit. Without dropout, losses and trained state must equal those
of an uninterrupted run in one process, up to the order of additions. With dropout, replicas must
draw different masks and other ranks the same ones. A run that never leaves its layout must equal
the uninterrupted one to the bit, with and without dropout.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from rapidformer.checkpoint.finding import read_run
from rapidformer.checkpoint.tensors import StoredTensors
from rapidformer.dist.processes import stop_processes
from rapidformer.engine import RapidformerEngine
from tests.parity.models import build_rows, collate
from tests.processes import run_in_kept_processes

Settings = dict[str, Any]
Layouts = tuple[str, ...]
UPDATES = 2
"""Of each leg; an epoch has six, so that legs begin and end inside of it."""
LEGS = 3
LOADED, TRAINED = "loaded", "trained"
TOLERANCE = 1e-5
"""Of a trained tensor, as a fraction of its norm: additions in another order, over six updates."""
DEEPSPEED_FILE = "deepspeed.json"
_DEEPSPEED = {"zero_optimization": {"stage": 2}}
LAYOUTS: dict[str, tuple[int, Settings]] = {
    "1": (1, {}),
    "DDP 2": (2, {}),
    "ZeRO-3 2": (2, {"zero_3_memory_optimization": True}),
    "TP 2": (2, {"tensor_model_parallel_size": 2}),
    "PP 2": (2, {"pipeline_model_parallel_size": 2}),
    "TP 2 x PP 2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "EP 2": (2, {"expert_model_parallel_size": 2}),
    "DeepSpeed 2": (2, {"deepspeed": _DEEPSPEED}),
}


@dataclass(frozen=True)
class Leg:
    """One stop of a route: where it loads from, and where it saves."""

    layout: str
    dropout: float
    load: Path | None
    folder: Path
    updates: int = UPDATES


@dataclass(frozen=True)
class Rank:
    """What one rank saw on a leg."""

    replica: int
    numbers: tuple[float, ...]
    """The next random numbers after loading: those of its first masks."""
    losses: list[list[tuple[float, float]]]
    """Loss and weight of each micro-batch, by update."""


@dataclass
class Route:
    """The layouts of a run in turn, and what was wrong on its last leg."""

    layouts: Layouts
    dropout: float
    error: float = 0.0
    """The largest difference from the uninterrupted run: of a loss or of a tensor."""
    problems: list[str] = field(default_factory=list)


def run_leg(leg: Leg) -> Rank:
    """Called on every rank."""
    torch.set_num_threads(1)
    engine = RapidformerEngine(args=_get_settings(leg))
    replica = engine.runtime.topology.get_rank("data")
    model = _build_model(leg.dropout)
    rows = build_rows("mixtral", 4 * UPDATES * LEGS)
    loader = engine.data.build_loader(rows, collate, shuffle=True, is_training=True)
    engine.compose(model)
    if leg.load is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)  # nothing may be right by luck
        engine.load_checkpoint(leg.load)
        engine.save_checkpoint(leg.folder / LOADED)
    state = torch.get_rng_state()
    numbers = tuple(torch.rand(3).tolist())
    torch.set_rng_state(state)
    losses = []
    for update in itertools.islice(engine.data.iterate_updates(loader), leg.updates):
        results = engine.run_update(lambda batch: model(**batch)["loss"], update)
        losses.append([(float(result.loss), float(result.weight)) for result in results])
        engine.step()
        if engine.updates.clock.updates % UPDATES == 0:
            engine.save_checkpoint(leg.folder / TRAINED)
    return Rank(replica, numbers, losses)


def _build_model(dropout: float) -> nn.Module:
    """A mixture of experts: the only kind of model that every layout can split."""
    torch.manual_seed(7)
    config = MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, max_position_embeddings=32,
        num_local_experts=4, pad_token_id=0, attention_dropout=dropout,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def _get_settings(leg: Leg) -> Settings:
    settings = dict(LAYOUTS[leg.layout][1])
    if "deepspeed" in settings:
        settings["deepspeed"] = str(leg.folder.parent / DEEPSPEED_FILE)
    return {
        "device": "cpu", "optimizer": "adam", "adam_eps": 1e-6, "lr": 1e-3, "seed": 5,
        "train_iters": UPDATES * LEGS, "global_batch_size": 4,
        "micro_batch_size": 1, "dynamic_shape": "off", "log_level": "error", **settings,
    }  # fmt: skip


def run_legs(legs: list[Leg]) -> list[Rank]:
    """In one group of processes: starting one takes longer than a leg."""
    ranks = [run_leg(leg) for leg in legs]
    stop_processes()
    return ranks


class Campaign:
    """Runs routes, and compares them with uninterrupted runs."""

    def __init__(self, folder: Path, dropout: float) -> None:
        self._folder = folder
        self._dropout = dropout
        self._ranks: dict[Layouts, list[Rank]] = {}
        """What the ranks saw on the last leg of each route."""
        self._straight: dict[str, list[Rank]] = {}
        """The same of uninterrupted runs."""
        folder.mkdir(parents=True, exist_ok=True)
        # Here, once: a rank must not read it while another one writes it.
        (folder / DEEPSPEED_FILE).write_text(json.dumps(_DEEPSPEED))

    def run(self, layouts: list[str], starts: list[str]) -> Iterator[Route]:
        """Every route of two and of three layouts that begins with one of the starts."""
        for start in starts:
            self._start([(start,)])
        for last in layouts:
            yield from self.extend([(start,) for start in starts], last)
        for start, last in itertools.product(starts, layouts):
            yield from self.extend([(start, layout) for layout in layouts], last)

    def follow(self, route: Layouts) -> Iterator[Route]:
        """A route between layouts of the same number of ranks, in one group of processes."""
        stops = [route[:count] for count in range(1, len(route) + 1)]
        failures = self._start(stops)
        yield from (self._look_at(stop, failures) for stop in stops[1:])

    def extend(self, routes: list[Layouts], last: str) -> Iterator[Route]:
        """Continue all of these in the same layout, and see what became of them."""
        longer = [(*route, last) for route in routes]
        failures = self._start(longer)
        for route in longer:
            found = self._look_at(route, failures)
            if not found.problems and len(route) == LEGS:
                shutil.rmtree(self._get_folder(route))
            yield found

    def _start(self, routes: list[Layouts]) -> dict[Layouts, str]:
        """Run the last leg of each route; returns those that failed, with the reason."""
        legs = [
            Leg(route[-1], self._dropout, self._get_source(route), self._get_folder(route))
            for route in routes
        ]
        try:
            for route, ranks in zip(routes, _run_on_ranks(legs), strict=True):
                self._ranks[route] = ranks
        except AssertionError as error:
            if len(routes) == 1:
                return {routes[0]: str(error)[-2000:]}
            # Each by itself, to see which one it was.
            return {key: why for route in routes for key, why in self._start([route]).items()}
        return {}

    def _get_folder(self, route: Layouts) -> Path:
        return self._folder / " to ".join(route)

    def _get_source(self, route: Layouts) -> Path | None:
        return self._get_folder(route[:-1]) / TRAINED if len(route) > 1 else None

    def _get_straight(self, layout: str) -> tuple[Path, list[Rank]]:
        """The uninterrupted run in a layout."""
        folder = self._folder / f"{layout} straight"
        if layout not in self._straight:
            leg = Leg(layout, self._dropout, None, folder, updates=UPDATES * LEGS)
            (self._straight[layout],) = _run_on_ranks([leg])
        return folder / TRAINED, self._straight[layout]

    # ---- what must hold --------------------------------------------------------------------------

    def _look_at(self, route: Layouts, failures: dict[Layouts, str]) -> Route:
        found = Route(route, self._dropout)
        if route in failures:
            found.problems.append(failures[route])
        else:
            self._judge(found)
        return found

    def _judge(self, found: Route) -> None:
        route, step = found.layouts, UPDATES * len(found.layouts)
        folder, source = self._get_folder(route), self._get_source(route)
        assert source is not None
        before = f"iter_{step - UPDATES:07d}"
        error = compare(folder / LOADED / before, source / before)
        if error > 0:
            found.problems.append(f"what was loaded is not what was saved: {error:.1e}")
        found.problems += _find_wrong_masks(self._ranks[route])
        if self._dropout and len({_get_masks(layout) for layout in route}) > 1:
            return  # other masks, other losses
        reference, ranks = self._get_straight(route[0] if self._dropout else "1")
        is_same = len(set(route)) == 1
        if is_same:
            reference, ranks = self._get_straight(route[0])
        name = f"iter_{step:07d}"
        error = compare(folder / TRAINED / name, reference / name)
        wanted = _compute_losses(ranks)[step - UPDATES : step]
        losses = _compute_losses(self._ranks[route])
        errors = [abs(a - b) / b for a, b in zip(losses, wanted, strict=True)]
        found.error = max(error, *errors)
        if found.error > (0.0 if is_same else TOLERANCE):
            found.problems.append(
                f"differs from the uninterrupted run: state {error:.1e}, losses {errors}"
            )


def _run_on_ranks(legs: list[Leg]) -> list[list[Rank]]:
    """Legs on the same number of ranks; returns the ranks of each."""
    for leg in legs:
        shutil.rmtree(leg.folder, ignore_errors=True)
        leg.folder.mkdir()
    everyone = run_in_kept_processes(run_legs, LAYOUTS[legs[0].layout][0], legs)
    return [list(ranks) for ranks in zip(*everyone, strict=True)]


def _get_masks(layout: str) -> str:
    """Layouts that agree here draw the same masks: sharding replicas does not change them."""
    splits = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    ranks, settings = LAYOUTS[layout]
    return str((ranks, [settings.get(name) for name in splits]))


def _find_wrong_masks(ranks: list[Rank]) -> Iterator[str]:
    for one, other in itertools.combinations(ranks, 2):
        if (one.numbers == other.numbers) != (one.replica == other.replica):
            what = "the same masks" if one.numbers == other.numbers else "different masks"
            yield f"ranks of replicas {one.replica} and {other.replica} draw {what}"


def _compute_losses(ranks: list[Rank]) -> list[float]:
    """The mean loss of every update; one rank of each replica counts."""
    replicas = {rank.replica: rank.losses for rank in ranks}.values()
    means = []
    for update in zip(*replicas, strict=True):
        pairs = [pair for micro_batches in update for pair in micro_batches]
        means.append(sum(a * b for a, b in pairs) / sum(weight for _, weight in pairs))
    return means


def compare(one: Path, other: Path) -> float:
    """The largest relative difference of any tensor; infinite if anything else differs.

    ``other`` is what several routes are compared with, and never written again.
    """
    mine, others = _read_tensors(one), _read_kept_tensors(other)
    if mine.keys() != others.keys() or _read_position(one) != _read_position(other):
        return math.inf
    return max(_compare(mine[name], others[name]) for name in mine)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    stored = StoredTensors(folder / "state")
    kinds = stored.kinds.items()
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds}
    stored.fill(tensors.items())  # at once: one by one takes seconds
    return tensors


@functools.lru_cache(maxsize=256)
def _read_kept_tensors(folder: Path) -> dict[str, Tensor]:
    return _read_tensors(folder)


def _compare(one: Tensor, other: Tensor) -> float:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return math.inf
    if torch.equal(one, other):
        return 0.0
    difference = float((one.double() - other.double()).norm() / other.double().norm())
    return difference if math.isfinite(difference) else math.inf


def _read_position(folder: Path) -> Any:
    run = read_run(folder)
    # Not the whole schedule: it has a rate for each group of parameters, and experts are a group.
    return run["step"], run["loader"], run["scheduler"]["last_epoch"]
