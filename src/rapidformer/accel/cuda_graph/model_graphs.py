"""Replay a model's forward pass and its backward pass as two graphs.

That holds for models whose outputs do not have the width of a batch, such as classifiers. Of
others, blocks are replayed.

As in whole steps, a batch runs with the same sizes whether it is replayed or not. All graphs share
their memory, so one call of a forward pass is replayed, until the next forward pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.block_calls import describe_mode
from rapidformer.accel.cuda_graph.block_graphs import BlockGraphs, hash_places
from rapidformer.accel.cuda_graph.capture import CudaCapture, describe_error
from rapidformer.accel.cuda_graph.inputs import (
    Inputs,
    NotRepeatableError,
    StaticInputs,
    read_inputs,
)
from rapidformer.accel.cuda_graph.passes import Request
from rapidformer.accel.cuda_graph.pieces import Pieces, surround
from rapidformer.accel.cuda_graph.recorded_block import RecordedForward
from rapidformer.accel.cuda_graph.replayed_code import ReplayedCode
from rapidformer.accel.cuda_graph.snapshot import get_numbers
from rapidformer.accel.cuda_graph.widths import Widths
from rapidformer.accel.later import note_mode
from rapidformer.accel.unpad.promises import reading_no_padding, reads_no_padding
from rapidformer.compat.torch_dispatch import tree_leaves
from rapidformer.compat.torch_tensors import count_changes
from rapidformer.config.effect import MOST_COPIED
from rapidformer.data.batch import NO_BATCH, count_rows
from rapidformer.data.nested import iterate_tensors
from rapidformer.data.update import MicroBatch, MicroBatchResult, Update
from rapidformer.optim.gradients import take_gradients
from rapidformer.overlay import list_layers, remove

_MOST_UNROUNDED = 4
"""With more sizes than these, blocks are better: they round up the number of tokens alone."""


class ModelPasses:
    """A model on inputs of one size, in the precision that it is called in."""

    def __init__(
        self, model: nn.Module, run: Callable[..., Any], static: StaticInputs,
        parameters: Sequence[nn.Parameter],
    ) -> None:  # fmt: skip
        self.modules, self.static, self.parameters, self._run = [model], static, parameters, run
        self._enter_mode, self._promises = note_mode(static.device), reads_no_padding()

    def run(self, **kwargs: Any) -> Any:
        """Run the model; raises if a replay of that would not do the same."""
        promise = reading_no_padding() if self._promises else nullcontext()
        with self._enter_mode(), promise:
            return _run_checked(self._run, kwargs)


def _run_checked(run: Callable[..., Any], batch: dict[str, Any]) -> Any:
    """What a model makes of a copy of its batch; raises if its caller would see a difference."""
    changes = _count_changes(batch)
    output = run(**batch)
    if changes != _count_changes(batch):
        raise NotRepeatableError("it changes its batch")
    check_output(output, batch)
    return output


def _count_changes(batch: Any) -> list[int]:
    return [count_changes(t) for t in iterate_tensors(batch) if not t.is_inference()]


class ModelGraphs(Pieces):
    """The graphs of a model's passes, in training, or else of its blocks."""

    description = "the model's passes"
    most_weights: float = MOST_COPIED
    """In bytes: gradients lie in memory twice."""
    most_sizes = 16
    """For how many sizes of a micro-batch a model is recorded."""
    of_blocks_kind = BlockGraphs

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        blocks: Sequence[nn.Module],
        capture: CudaCapture,
    ) -> None:
        super().__init__(model, capture, ReplayedCode((), model))
        self._blocks = blocks
        self.of_blocks: BlockGraphs | None = None
        """What replays the blocks, if the model is not replayed."""
        self._weights: list[nn.Parameter] = []
        self._places: Hashable = None
        """Which weights there are, and where."""
        self.parameters: list[nn.Parameter] = []
        """The trainable ones."""
        self._described: Hashable = None
        """What the code depends on in this call."""
        self._widths = Widths(
            model, parameters, self.device, is_16_bit=capture.is_16_bit, warns=False
        )
        self._recorded: dict[Hashable, RecordedForward] = {}
        self._unrounded: set[int] = set()
        """Hashes of keys whose sizes are not of the few that batches are rounded up to."""
        self._has_run = self._is_known = False
        self._run: Callable[..., Any]
        if sum(parameter.nbytes for parameter in model.parameters()) > self.most_weights:
            self.problem = self.problem or "it is large, so launching kernels costs little"
        if self.problem is None:
            surround(model, "replay", self)

    @property
    def count(self) -> int:
        """For how many sizes the model is replayed."""
        return len(self._recorded)

    def choose(self) -> Pieces:
        """What may be replayed: the model's passes, or else its blocks."""
        if self.problem is not None and self.of_blocks is None and self._blocks:
            self.of_blocks = self.of_blocks_kind(self.model, self._blocks, self.capture)
        return self if self.of_blocks is None else self.of_blocks

    def give_up(self, problem: str) -> None:
        """Run the model as it is from now on."""
        if self.problem is not None:
            return
        super().give_up(problem)
        self.end()  # recordings of blocks use the same memory
        self._recorded.clear()
        self._gradients, self.parameters = {}, []
        if "replay" in list_layers(self.model):
            remove(self.model, "replay")

    def stop(self, problem: str) -> None:
        """Run the model and its blocks as they are from now on."""
        chosen, self._blocks = self.choose(), ()
        chosen.give_up(problem)

    def close(self) -> None:
        """Let the model run as it did before."""
        self._blocks = ()
        super().close()
        if self.of_blocks is not None:
            self.of_blocks.close()

    @contextmanager
    def passing(self, *, begins: bool = True) -> Iterator[None]:
        """Inside, the forward pass of a micro-batch runs or goes on; a backward pass follows."""
        with super().passing(begins=begins):
            yield
        if not self._has_run and not self._recorded:
            self.give_up("a step does not call it")

    def begin(self) -> None:
        """A forward pass begins."""
        super().begin()
        self._has_run = False

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """The model's forward pass."""
        if not self.is_replayed(self.model):
            return run(*args, **kwargs)
        self._run = run
        try:
            self._look()
            self.check_call(args, kwargs)
            inputs = self.read(kwargs)
            if inputs is None:
                return run(**kwargs)
            return self._replay(inputs) if self._is_known else self._run_first(inputs)
        except NotRepeatableError as problem:
            self.give_up(str(problem))
        return run(*args, **kwargs)

    def _look(self) -> None:
        """See what this call depends on; recordings for other weights are of no use."""
        described = self._code.describe()
        if described != self._described:  # weights may have been replaced
            self._described, self._weights = described, list(self.model.parameters())
        places = hash_places(self._weights), hash(tuple(map(id, self._weights)))
        if places != self._places:
            self._places = places
            self._recorded.clear()
            self.parameters = [p for p in self._weights if p.requires_grad]

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call that a replay cannot replace."""
        if args:
            raise NotRepeatableError("it is called with positional arguments")
        if any(tensor.requires_grad for tensor in iterate_tensors(kwargs)):
            raise NotRepeatableError("its inputs have gradients")
        if self._has_run:
            raise NotRepeatableError("it is called more than once in a step")
        self._has_run = True
        self._code.check_hooks(self.parameters if self.learns else ())

    def _run_first(self, inputs: Inputs) -> Any:
        """The first pass, which may still set things up, with the sizes of later ones."""
        before, output = self._code.take_snapshot(self.device), self._run_sized(inputs)
        if not inputs.is_changed:
            try:
                check_output(output, inputs.batch)
            except NotRepeatableError as problem:
                self.give_up(str(problem))
        elif not self.may_change(inputs.batch, inputs):
            before.restore()
            raise NotRepeatableError("what it returns depends on the width of a batch")
        self._is_known = True
        return output

    def _run_sized(self, inputs: Inputs) -> Any:
        """Run the model without a graph, on a batch of the size that a graph has."""
        if not inputs.is_changed:
            return self._run(**inputs.batch)
        before = self._code.take_snapshot(self.device)
        try:
            return _run_checked(self._run, StaticInputs(inputs, self.device).batch)
        except NotRepeatableError:
            before.restore()
            raise

    def read(self, kwargs: dict[str, Any]) -> Inputs | None:
        """The inputs of a call; None if it must run as it is."""
        inputs = read_inputs(self.model, kwargs)
        if self._is_known and not self.may_change(kwargs, inputs):
            raise NotRepeatableError("what it returns depends on the width of a batch")
        return inputs

    def may_change(self, kwargs: dict[str, Any], inputs: Inputs | None) -> bool:
        """Whether a call may have these inputs instead of its own, which may be narrower."""
        batch = MicroBatch(kwargs, NO_BATCH, False, True, 0, 0)
        request = Request(self._run_compared, Update((batch,)), [1.0], self._described, None)
        held = take_gradients(self.parameters)  # of other micro-batches
        try:
            return self._widths.may_change(request, [inputs], self._code)
        finally:
            for parameter, gradient in zip(self.parameters, held, strict=True):
                parameter.grad = gradient

    def _run_compared(self, micro_batch: MicroBatch) -> MicroBatchResult:
        """All that the model returns as one number: do more columns change it?"""
        output = self._run(**micro_batch.batch)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        values = torch.cat([t.float().flatten() for t in tensors if t.is_floating_point()])
        factors = torch.arange(1.0, len(values) + 1, device=values.device).cos()
        return MicroBatchResult(loss=values @ factors, weight=1.0)

    def _replay(self, inputs: Inputs) -> Any:
        key = (inputs.key, self._described, describe_mode(self.device))
        if key not in self._recorded:
            is_due = inputs.is_rounded or hash(key) in self._unrounded
            if not is_due:
                self._unrounded.add(hash(key))
            if len(self._unrounded) > _MOST_UNROUNDED:
                raise NotRepeatableError("its batches have many sizes")
            if not is_due or len(self._recorded) >= self.most_sizes:
                return self._run_sized(inputs)
            self._recorded[key] = self._record(inputs)
        else:
            self._code.note_replay()
        numbers = get_numbers(self.device)
        return self.replay(self._recorded[key], inputs, numbers, lambda: True)

    def _record(self, inputs: Inputs) -> RecordedForward:
        static, before = StaticInputs(inputs, self.device), self._code.take_snapshot(self.device)
        passes = ModelPasses(self.model, self._run, static, self.parameters)
        try:
            return self.record([passes], self.capture, before)[0]
        except Exception as error:
            # Whatever it is, the model itself runs next: if it fails, too, the user sees that.
            raise NotRepeatableError(describe_error(error)) from None
        finally:
            before.restore()


def check_output(output: Any, batch: Mapping[str, Any]) -> None:
    """Refuse outputs with a value for each token: their width would be that of the graph."""
    rows = count_rows(batch)
    widths = {tensor.shape[1] for tensor in iterate_tensors(batch) if tensor.dim() > 1}
    for leaf in tree_leaves(output):
        is_plain = type(leaf) is Tensor and leaf.dim() <= 2
        is_by_row = is_plain and leaf.shape[:1] in ((), (rows,)) and not widths & {*leaf.shape[1:]}
        if leaf is not None and not is_by_row:
            raise NotRepeatableError("it returns more than a few numbers for each row")
