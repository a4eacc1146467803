"""Replay an update as one CUDA graph: forward and backward passes, clipping, optimizer.

A small model spends most of a step launching kernels. A graph launches all of them at once, but
repeats only what the device did: not the Python code around it. So the passes over each kind of
batch first run as usual, are recorded, and must then give the same losses and gradients when they
are replayed. Schedule, logging and callbacks stay outside, and so does the optimizer unless it is
one that can be recorded (``graphed_update.py``).

A batch runs with the same sizes whether it is replayed or not, so a result depends neither on when
something was recorded nor on where a run was resumed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.capture import Capture
from rapidformer.accel.cuda_graph.inputs import Inputs, NotRepeatableError, read_inputs
from rapidformer.accel.cuda_graph.side_effects import Examination
from rapidformer.accel.dropout import DROPOUTS
from rapidformer.accel.watched import describe_watched, find_watched
from rapidformer.compat.torch_modules import list_hook_tables
from rapidformer.compat.torch_tensors import count_changes, has_gradient_hooks
from rapidformer.data.update import MicroBatch, Update
from rapidformer.engine.graphed_passes import Outcome, Passes, RunForward
from rapidformer.engine.graphed_update import GraphedUpdate
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.models.work import ModelWork
from rapidformer.optim.update import take_gradients

MOST_GRAPHS = 8
_MOST_AT_ONCE = 6
"""How many graphs of rounded sizes are recorded before these sizes have been seen twice."""
_LARGER_SIZES = 3
"""How many sizes above the current one are recorded with the second graph of rounded sizes."""
_MOST_WORK = 5e13
"""Operations of a micro-batch above which a GPU is busy for so long that launches do not matter."""
_CHECKED_BATCHES = 2
"""On how many batches the first graph is compared with the passes themselves."""
_LIMIT = 1e-5
_LIMIT_16_BIT = 1e-3


@dataclass
class _Graph:
    passes: Passes
    outcome: Outcome
    replay: Callable[[], None]


@dataclass(frozen=True)
class _Request:
    """An update to run."""

    update: Update
    weights: list[float]
    describe: Callable[[list[Inputs]], Hashable]
    """The key of its graph, if these are its inputs."""
    build: Callable[[list[Inputs]], Passes]


class GraphedPasses:
    """All graphs of a run."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        capture: Capture,
        count_labels: Callable[[MicroBatch], float],
        *,
        is_asked: bool,
        is_16_bit: bool,
        compiles: bool,
        work: ModelWork | None,
    ) -> None:
        self._model = model
        self._code: Examination
        self._dropouts: list[nn.Module] = []
        self._hooks: list[Mapping[int, Any]] = []
        self._hook_count = 0
        self._parameters = parameters
        self._device = device
        self._capture = capture
        self._count_labels = count_labels
        self._is_asked = is_asked
        self._limit = _LIMIT_16_BIT if is_16_bit else _LIMIT
        self._compiles = compiles
        self._work = work
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: set[int] = set()
        """Hashes of keys: with many sizes, the keys themselves would fill the memory."""
        self._steps: Sequence[Callable[..., Any]] = ()
        self._weights: Hashable = None
        self._is_warm = False
        self._checked = 0
        self.problem: str | None = None
        """Why nothing is replayed any more; None while it may be."""

    @property
    def count(self) -> int:
        """Graphs in use: recorded, and found to give the right results."""
        return len(self._graphs) if self._checked >= _CHECKED_BATCHES else 0

    @property
    def updates(self) -> bool:
        """Whether the graphs update the weights, too."""
        return any(graph.passes.updated for graph in self._graphs.values())

    def run(
        self,
        run_forward: RunForward,
        update: Update,
        steps: Sequence[Callable[..., Any]],
        graphed_update: GraphedUpdate | None = None,
    ) -> Outcome | None:
        """Run the passes of an update; None if they must run without a graph.

        ``steps`` is the user's code that ``run_forward`` calls. If a ``graphed_update`` is given,
        a graph may update the weights as well.
        """
        if self.problem is not None:
            return None
        if any(parameter.grad is not None for parameter in self._parameters):
            return None  # the gradients of this update are added to others
        weights = [self._count_labels(each) for each in update]
        if any(each.is_filler for each in update) or min(weights) <= 0:
            return None
        try:
            if not self._is_warm:
                self._steps, self._code = steps, Examination(steps, self._model)
                self._list_modules()
                self._check(update)
            self._check_hooks()
            inputs = [read_inputs(self._model, each.batch) for each in update]
        except NotRepeatableError as problem:
            self._give_up(str(problem))
            return None
        known = [each for each in inputs if each is not None]
        if len(known) < len(inputs) or steps != self._steps:
            return None  # the loss must be seen on a padded batch first; or it is another loss
        self._drop_moved()
        about_model = self._describe_model(), self._code.read_values()

        def describe(inputs: list[Inputs]) -> Hashable:
            batches = tuple(each.key for each in inputs)
            return batches, about_model, graphed_update is not None

        def build(inputs: list[Inputs]) -> Passes:
            return Passes(
                run_forward, self._parameters, inputs, update, weights, self._device, graphed_update
            )

        return self._run(_Request(update, weights, describe, build), known)

    def _run(self, request: _Request, inputs: list[Inputs]) -> Outcome | None:
        key, weights = request.describe(inputs), request.weights
        graph = self._graphs.get(key)
        if graph is not None and not graph.passes.prepare():
            del self._graphs[key]
            graph = None
        if graph is not None:
            graph.passes.fill(inputs, weights)
            if not self.count:
                return self._try(lambda before: self._compare(graph, weights, before))
            graph.replay()
            return graph.outcome.copy(weights)
        is_full = len(self._graphs) == MOST_GRAPHS or (bool(self._graphs) and not self.count)
        is_new, is_first = hash(key) not in self._seen, not self._is_warm
        self._seen.add(hash(key))
        # A new size may never come again; but rounded ones are few, so the first of them will.
        is_common = len(self._graphs) < _MOST_AT_ONCE and all(each.is_rounded for each in inputs)
        waits = is_full or (is_new and not is_first and not is_common)
        if waits and not any(each.is_rounded for each in inputs):
            return None  # nothing was rounded, so the usual passes give the same

        def work(before: _State) -> Outcome:
            if waits:
                return request.build(inputs).run_passes()
            if self.count == 1 and is_common and len(request.update) == 1:
                self._record_larger(request, key, before)
            return self._record(request.build(inputs), key, weights, before)

        return self._try(work)

    def _record_larger(self, request: _Request, own: Hashable, before: _State) -> None:
        """Record the next larger sizes as well: they will come, so better now than in mid-run.

        Smaller ones cannot be made from this batch.
        """
        for sizes_up in range(1, _LARGER_SIZES + 1):
            inputs = read_inputs(self._model, request.update[0].batch, sizes_up=sizes_up)
            key = request.describe([inputs]) if inputs is not None else own
            if inputs is None or key == own or key in self._graphs:
                continue
            if not self._capture.has_room:
                return
            try:
                self._record(request.build([inputs]), key, request.weights, before, is_used=False)
            except Exception:
                # Such a batch may never come; if it does, recording is tried again.
                take_gradients(self._parameters)
                return
            finally:
                before.restore()

    def _try(self, work: Callable[[_State], Outcome]) -> Outcome | None:
        """The result of ``work``; if it fails, None, with the state from before."""
        before = _State(self._code.list_tensors(), self._device)
        try:
            return work(before)
        except RapidformerError as error:
            self._give_up(str(error))
        except Exception as error:
            # Whatever it is, the passes themselves run next: if they fail too, the user sees that.
            self._give_up(_describe_error(error))
        take_gradients(self._parameters)
        before.restore()
        return None

    def _record(
        self,
        passes: Passes,
        key: Hashable,
        weights: Sequence[float],
        before: _State,
        *,
        is_used: bool = True,
    ) -> Outcome:
        if not self._is_warm:
            # The very first one may still set things up, such as compiled blocks.
            outcome = self._capture.warm_up(passes.run_passes, forbids_reads=False)
            before.check_host_numbers()
            self._is_warm = True
            return outcome
        # Compiling a block for another size waits for the device as well.
        expected = self._capture.warm_up(passes.rehearse, forbids_reads=not self._compiles).read()
        before.restore()
        # All graphs leave their gradients in the same memory.
        left = (graph.outcome.gradients for graph in self._graphs.values())
        passes.gradients = next((each for each in left if each is not None), None)
        with passes.without_effect():
            graph = _Graph(passes, *self._capture.record(passes.run))
        self._replay(graph, expected, before, is_used=is_used)
        self._graphs[key] = graph
        return graph.outcome.copy(weights)

    def _compare(self, graph: _Graph, weights: Sequence[float], before: _State) -> Outcome:
        expected = self._capture.warm_up(graph.passes.run_passes, forbids_reads=False).read()
        before.restore()
        self._replay(graph, expected, before)
        return graph.outcome.copy(weights)

    def _replay(
        self, graph: _Graph, expected: list[float], before: _State, *, is_used: bool = True
    ) -> None:
        """Replay a graph and compare its results with the expected ones."""
        with graph.passes.without_effect():
            graph.replay()
            self._check_results(graph.outcome, expected)
        self._checked += 1
        if graph.passes.updated and is_used:
            before.restore()
            graph.passes.prepare()
            graph.replay()  # this time, it updates the weights

    def _check_results(self, outcome: Outcome, expected: list[float]) -> None:
        for mine, theirs in zip(outcome.read(), expected, strict=True):
            is_same = math.isclose(mine, theirs, rel_tol=self._limit, abs_tol=1e-7)
            if not is_same and not (math.isnan(mine) and math.isnan(theirs)):
                raise NotRepeatableError(
                    f"replaying a step gave {mine:.6g} where running it gave {theirs:.6g}"
                )

    def _check(self, update: Update) -> None:
        """Refuse what is known beforehand not to be replayable, or not worth it."""
        if self._is_asked:
            return
        info = update[0].info
        operations = (
            self._work.count(tokens=info.slots, targets=info.slots, rows=info.rows)
            if self._work is not None
            else 0.0
        )
        if operations > _MOST_WORK:
            raise NotRepeatableError("its steps are long, so launching kernels costs little")
        if self._code.effect is not None:
            raise NotRepeatableError(f"{self._code.effect} (a replay does not run Python code)")

    def _check_hooks(self) -> None:
        """Refuse hooks, which may be registered at any time."""
        if self._is_asked:
            return
        count = sum(map(len, self._hooks))
        if count != self._hook_count:
            watched = find_watched(dict(self._model.named_modules()))
            if watched:
                raise NotRepeatableError(
                    f"a replay would not run the hooks on {describe_watched(watched)}"
                )
            self._hook_count = count
        if has_gradient_hooks(self._parameters):
            raise NotRepeatableError("a replay would not run the hooks on its parameters")

    def _list_modules(self) -> None:
        modules = list(self._code.modules)
        self._dropouts = [module for module in modules if isinstance(module, DROPOUTS)]
        self._hooks = [table for module in modules for table in list_hook_tables(module)]

    def _describe_model(self) -> Hashable:
        """What a forward pass depends on, apart from weights."""
        training = tuple(module.training for module in self._code.modules)
        return training, tuple(module.p for module in self._dropouts)

    def _drop_moved(self) -> None:
        """Drop all graphs if weights have moved in memory, or were frozen or unfrozen."""
        weights = hash(tuple((p.data_ptr(), p.requires_grad) for p in self._parameters))
        if weights != self._weights:
            self._graphs.clear()
            self._weights = weights

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self._graphs.clear()
        if self._is_asked:
            raise ConfigurationError(f"--cuda-graph on: {problem}. Leave the flag out.")


class _State:
    """What passes may change, apart from gradients: random numbers, buffers and similar."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._drawn = torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()
        self._host = _get_host_numbers(device)
        self._tensors = [(t, t.detach().clone(), count_changes(t)) for t in tensors]

    def restore(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._drawn, self._device)
        else:
            torch.set_rng_state(self._drawn)
        for tensor, value, changes in self._tensors:
            if count_changes(tensor) != changes:
                with torch.no_grad():
                    tensor.copy_(value)

    def check_host_numbers(self) -> None:
        """Refuse a step that draws random numbers on the host: a replay would repeat them."""
        before, now = self._host, _get_host_numbers(self._device)
        if not all(_are_equal(mine, theirs) for mine, theirs in zip(before, now, strict=True)):
            raise NotRepeatableError(
                "a step draws random numbers on the host, which a replay would not"
            )


def _describe_error(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    if "synchronizing CUDA operation" in text:
        return "a step waits for the GPU, as .item() does"
    return f"{type(error).__name__}: {text}"


def _get_host_numbers(device: torch.device) -> list[Any]:
    states: list[Any] = [random.getstate(), np.random.get_state()]
    return states if device.type == "cpu" else [*states, torch.get_rng_state()]


def _are_equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tensor):
        return torch.equal(mine, theirs)
    return str(mine) == str(theirs)
