"""``--cuda-graph``: replay an update as one CUDA graph, which launches all its kernels at once.

A graph repeats only what the device did: not the Python code around it. So the passes over each
kind of batch first run as usual, are recorded, and must then give the same losses and gradients
when they are replayed. Schedule, logging and callbacks stay outside, and so does the optimizer
unless it is one that can be recorded. Gradients that several ranks have are summed between two
graphs, so each rank records and replays by itself.

A batch runs with the same sizes whether it is replayed or not, so a result depends neither on when
something was recorded nor on where a run was resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor, nn

from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.cuda_graph.block_calls import describe_mode
from rapidformer.accel.cuda_graph.block_graphs import hash_places
from rapidformer.accel.cuda_graph.capture import CudaCapture, describe_error
from rapidformer.accel.cuda_graph.finishing import Finishing, agree
from rapidformer.accel.cuda_graph.inputs import Inputs, NotRepeatableError, read_inputs
from rapidformer.accel.cuda_graph.model_graphs import ModelGraphs
from rapidformer.accel.cuda_graph.passes import (
    Exchange,
    GraphedUpdate,
    Outcome,
    Passes,
    Request,
    RunForward,
)
from rapidformer.accel.cuda_graph.pieces import Pieces
from rapidformer.accel.cuda_graph.recorder import RecordedPasses, Recorder
from rapidformer.accel.cuda_graph.replayed_code import ReplayedCode
from rapidformer.accel.cuda_graph.snapshot import Snapshot, count_unused_numbers
from rapidformer.accel.cuda_graph.stacks import pays
from rapidformer.accel.cuda_graph.widths import MANY_TOKENS, Widths
from rapidformer.accel.sharding.placed_weights import PlacedWeights
from rapidformer.accel.unpad.calls import Removal
from rapidformer.accel.unpad.rows import Sizes
from rapidformer.data.update import MicroBatch, Update
from rapidformer.dist.topology import Topology
from rapidformer.errors import ConfigurationError, is_out_of_gpu_memory
from rapidformer.log import get_logger
from rapidformer.models.work import ModelWork
from rapidformer.optim.gradients import take_gradients
from rapidformer.overlay import find_fact

MOST_GRAPHS = 16
_MOST_AT_ONCE = 6
"""How many graphs are recorded before one has been compared on a later batch, and how many of
rounded sizes before these sizes have been seen twice.
"""
_LARGER_SIZES = 3
"""How many sizes above the current one are recorded with the first graph after that comparison."""
_MOST_WORK = 5e13
"""Operations of a micro-batch above which a GPU is busy for so long that launches do not matter."""


LONG = "its steps are long, so launching kernels costs little"


class LongStepsError(NotRepeatableError):
    """Graphs would be of no use."""


class GraphedPasses:
    """All graphs of a run."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        capture: CudaCapture,
        count_labels: Callable[[MicroBatch], float],
        *,
        is_asked: bool,
        work: ModelWork | None,
        topology: Topology,
        exchange: Exchange | None,
        blocks: Sequence[nn.Module] = (),
    ) -> None:
        self._model, self._parameters, self._blocks = model, parameters, blocks
        self._device = capture.device
        self._count_labels, self._is_asked, self._work = count_labels, is_asked, work
        self._capture, self._topology, self._exchange = capture, topology, exchange
        self.placed = exchange if isinstance(exchange, PlacedWeights) else None
        """The weights of a sharded model, used by every pass of this run."""
        updated = self.placed.shards if self.placed is not None else parameters
        self._leaves = list(dict.fromkeys([*parameters, *updated]))
        """All that may get gradients: whole weights, and their shards."""
        self.finishing = Finishing(capture, updated)
        """The update, unless it is part of the graph of the passes."""
        self._recorder = Recorder(capture)
        self._widths = Widths(model, parameters, self._device, is_16_bit=capture.is_16_bit)
        self._code: ReplayedCode
        self._graphs: dict[Hashable, RecordedPasses] = {}
        self._seen: set[int] = set()
        """Hashes of keys: with many sizes, the keys themselves would fill the memory."""
        self._replays = 0
        self._looked_ahead = False
        """Whether sizes were recorded that had not come yet."""
        self._places: Hashable = None
        """Where the weights were when the graphs were recorded."""
        self.problem: str | None = None
        """Why no step is replayed any more; None while it may be."""
        self._has_ended = False
        """Whether every rank knows that none is."""
        self._pieces: ModelGraphs | None = None

    @property
    def count(self) -> int:
        """Graphs in use: recorded, and found to give the right results."""
        is_proven = any(graph.is_proven for graph in self._graphs.values())
        return len(self._graphs) if is_proven else 0

    @property
    def in_pieces(self) -> Pieces | None:
        """Replays the model's passes, or else its blocks, if whole steps cannot be replayed."""
        return None if self._pieces is None else self._pieces.choose()

    @property
    def obstacle(self) -> str | None:
        """Why neither steps nor parts of them are replayed; None while they are, or may be."""
        pieces = self.in_pieces
        if pieces is None or pieces.problem is None:
            return None if pieces is not None else self.problem
        return f"{self.problem}; nor are its parts: {pieces.problem}"

    @property
    def updates(self) -> bool:
        """Whether the graphs update the weights, too."""
        graphs = self._graphs.values()
        return self.finishing.updates or any(graph.passes.updated for graph in graphs)

    def run(
        self,
        run_forward: RunForward,
        update: Update,
        steps: Sequence[Callable[..., Any]],
        graphed_update: GraphedUpdate | None = None,
    ) -> Outcome | None:
        """Run the passes of an update, maybe with the update itself; None: without a graph.

        All ranks call this; ``sum_gradients`` and ``finishing`` have the rest.
        """
        if self._has_ended:
            return None
        request, inputs = None, list[Inputs | None]()
        try:
            if self.problem is None:
                request = self._read_request(run_forward, update, steps, graphed_update)
            if request is not None:
                inputs = [read_inputs(self._model, micro_batch.batch) for micro_batch in update]
        except NotRepeatableError as problem:
            is_worth_it = not isinstance(problem, LongStepsError)
            self._give_up(str(problem), in_pieces=is_worth_it)
        sizes = (item.sizes for item in inputs if item is not None)
        self.problem, least = agree(self._topology, self.problem, sizes)
        if self.problem is not None:
            self._has_ended = True
            self._stop_whole_steps()
            if self._exchange is not None:
                self._exchange.close_places()
            return None
        if self.placed is not None:
            self.placed.gather()  # on all ranks: one that replays nothing runs the same exchange
        outcome = None if request is None else self._run_rounded(request, inputs, least)
        if outcome is None and self.placed is not None:
            self.placed.use()
        return outcome

    def keep_to_pieces(self, problem: str) -> Pieces | None:
        """Stop replaying whole steps; returns what replays their parts, or None."""
        if self.problem is None and self._blocks:
            self.problem = problem
            self._stop_whole_steps()
            self._start_pieces()
        return self.in_pieces

    def give_up_pieces(self, problem: str) -> None:
        """Stop replaying parts of steps, too."""
        if self._pieces is not None:
            self._pieces.stop(problem)

    def _stop_whole_steps(self) -> None:
        self._drop()
        removal = find_fact(self._model, Removal)
        if removal is not None:
            removal.stop_yielding()

    def sum_gradients(self, outcome: Outcome) -> list[Tensor | None] | None:
        """The sums over all ranks, in the order of ``finishing.parameters``; None: there is one."""
        if self._exchange is None:
            return None
        assert outcome.gradients is not None
        pairs = zip(self._parameters, outcome.gradients, strict=True)
        sums = self._exchange.sum_placed({p: g for p, g in pairs if g is not None})
        return list(map(sums.get, self._parameters))

    def _run_rounded(
        self, request: Request, inputs: list[Inputs | None], least: Sizes
    ) -> Outcome | None:
        """The same, with the sizes that ranks have agreed on."""
        inputs = self._round(request, inputs, least)
        known = [item for item in inputs if item is not None]
        if len(known) < len(inputs):
            return None  # it must run as it is
        places = hash_places(self._parameters)
        if places != self._places:  # weights have moved in memory, or were frozen or unfrozen
            self._drop()
            self._places = places
        return self._run(request, known, least)

    def _read_request(
        self,
        run_forward: RunForward,
        update: Update,
        steps: Sequence[Callable[..., Any]],
        graphed_update: GraphedUpdate | None,
    ) -> Request | None:
        """What is to run; None if this update cannot be replayed."""
        if not self._recorder.is_warm:
            self._code = ReplayedCode(steps, self._model)
            if not self._is_asked:
                self._check(update)
        if any(parameter.grad is not None for parameter in self._leaves):
            return None  # the gradients of this update are added to others
        weights = [self._count_labels(micro_batch) for micro_batch in update]
        if any(micro_batch.is_filler for micro_batch in update) or min(weights) <= 0:
            return None
        if not self._is_asked:
            self._code.check_hooks(self._leaves, self._exchange)
        if steps != self._code.steps:
            return None  # another loss
        if self.placed is not None:
            run_forward = self.placed.using(run_forward)
        return Request(
            run_forward, update, weights, (self._code.describe(), describe_mode(self._device)),
            graphed_update=graphed_update if self._exchange is None else None,
            exchange=self._exchange,
        )  # fmt: skip

    def close(self) -> None:
        """Drop all graphs and give their memory back."""
        self.problem = self.problem or "the engine is closed"
        self._drop()
        if self._exchange is not None:
            self._exchange.close_places()
        if self._pieces is not None:
            self._pieces.close()
        self._capture.close()

    def _drop(self) -> None:
        self._graphs.clear()
        self.finishing.forget()

    def _round(
        self, request: Request, inputs: list[Inputs | None], least: Sizes
    ) -> list[Inputs | None]:
        """The inputs of each micro-batch, with one of a few widths if the loss allows it."""
        inputs = [
            item
            if item is not None and item.sizes == least
            else read_inputs(self._model, micro_batch.batch, least=least)
            for item, micro_batch in zip(inputs, request.update, strict=True)
        ]
        compiled = None if self._recorder.is_warm else find_fact(self._model, CompiledBlocks)
        if compiled is not None and any(item is None or item.is_rounded for item in inputs):
            compiled.expect_other_sizes()
        reads_tensors = self._code.examination.reads_tensors
        if not reads_tensors and self._widths.may_change(request, inputs, self._code):
            return inputs
        return [
            read_inputs(self._model, micro_batch.batch, widens=False)
            for micro_batch in request.update
        ]

    def _run(self, request: Request, inputs: list[Inputs], least: Sizes) -> Outcome | None:
        key, weights = request.describe(inputs), request.weights
        graph = self._graphs.get(key)
        if graph is not None and not graph.passes.prepare():
            del self._graphs[key]
            graph = None
        if graph is not None:
            graph.passes.fill(inputs, weights)
            self._code.note_replay()
            if not graph.is_proven:
                return self._try(lambda before: self._recorder.compare(graph, before).copy(weights))
            graph.replay()
            self._replays += 1
            return graph.outcome.copy(weights)
        most = MOST_GRAPHS if self.count else min(MOST_GRAPHS, _MOST_AT_ONCE)
        is_full = len(self._graphs) >= most
        is_new, is_first = hash(key) not in self._seen, not self._recorder.is_warm
        self._seen.add(hash(key))
        # A new size may never come again; but rounded ones are few, so the first of them will.
        is_rounded = all(item.is_rounded for item in inputs)
        is_common = is_rounded and len(self._graphs) < _MOST_AT_ONCE
        is_rare = not is_rounded and not pays(len(self._graphs), self._replays)
        waits = is_full or is_rare or (is_new and not is_first and not is_common)
        if waits and not any(item.is_changed for item in inputs):
            return None  # the usual passes run with the same sizes

        def work(before: Snapshot) -> Outcome:
            if waits:
                return Passes(request, inputs, self._parameters, self._device).run()
            is_small = len(request.update) == 1 and inputs[0].num_tokens <= MANY_TOKENS
            if self.count and is_common and is_small and not self._looked_ahead:
                self._looked_ahead = True
                self._record_larger(request, key, least, before)
            return self._record(request, inputs, before)

        return self._try(work)

    def _record_larger(
        self, request: Request, current: Hashable, least: Sizes, before: Snapshot
    ) -> None:
        """Record the next larger sizes as well: they will come, so better now than in mid-run."""
        for sizes_up in range(1, _LARGER_SIZES + 1):
            read = (
                read_inputs(self._model, micro_batch.batch, least=least, sizes_up=sizes_up)
                for micro_batch in request.update
            )
            inputs = [item for item in read if item is not None]
            key = request.describe(inputs) if len(inputs) == len(request.update) else current
            if key == current or key in self._graphs:
                continue
            if not self._capture.has_room:
                return
            try:
                self._record(request, inputs, before, is_used=False)
            except Exception as error:
                # Such a batch may never come; if it does, recording is tried again.
                get_logger().info(
                    "no CUDA graph was recorded ahead for larger batches "
                    f"({describe_error(error)}); if they come, recording is tried again."
                )
                take_gradients(self._parameters)
                return
            finally:
                before.restore()

    def _try(self, work: Callable[[Snapshot], Outcome]) -> Outcome | None:
        """The result of ``work``; if it fails, None, with the state from before."""
        before = self._code.take_snapshot(self._device)
        try:
            outcome = work(before)
            if self.placed is not None and self.placed.have_gradients:
                raise NotRepeatableError("a step gives gradients to shards of the weights")
            return outcome
        except Exception as error:
            # Whatever it is, the passes themselves run next: if they fail too, the user sees that.
            problem = describe_error(error)
            has_memory = not is_out_of_gpu_memory(error)
        take_gradients(self._leaves)
        before.restore()
        self._give_up(problem, in_pieces=has_memory)
        return None

    def _record(
        self, request: Request, inputs: list[Inputs], before: Snapshot, *, is_used: bool = True
    ) -> Outcome:
        passes = Passes(request, inputs, self._parameters, self._device)
        if not self._recorder.is_warm:
            return self._recorder.warm_up(passes, before, count_unused_numbers(self._model))
        # All graphs leave their gradients in the same memory.
        left = (graph.outcome.gradients for graph in self._graphs.values())
        gradients = next((kept for kept in left if kept is not None), None)
        graph = self._recorder.record(passes, gradients, before, is_used=is_used)
        graph.is_proven = self.count > 0  # one of the first is compared on a later batch as well
        self._graphs[request.describe(inputs)] = graph
        return graph.outcome.copy(request.weights)

    def _check(self, update: Update) -> None:
        """Refuse what is not worth it, or known beforehand not to be replayable."""
        info = update[0].info
        slots = info.slots or info.rows  # images have no tokens to count
        if self.is_long(slots, info.rows):
            raise LongStepsError(LONG)
        self._code.check_effects()

    def is_long(self, slots: int, rows: int) -> bool:
        """Whether the passes of a micro-batch take so long that launches do not matter."""
        work = self._work
        return bool(work and work.count(tokens=slots, targets=slots, rows=rows) > _MOST_WORK)

    def _give_up(self, problem: str, *, in_pieces: bool) -> None:
        self.problem = problem
        self._graphs.clear()
        if self._is_asked:
            raise ConfigurationError(f"--cuda-graph on: {problem}. Leave the flag out.")
        if in_pieces and self._blocks:
            self._start_pieces()

    def _start_pieces(self) -> None:
        self._pieces = ModelGraphs(self._model, self._parameters, self._blocks, self._capture)
