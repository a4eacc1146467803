"""Replay a model's passes, where the code around them must run in every step.

A step that counts, prints or reads a value cannot be one graph. The call of its model can be two,
of its forward and of its backward pass, while the step and the loss run as they are: to autograd,
the call is one operation. That holds for models whose outputs do not have the width of a batch,
such as classifiers. Of others, blocks are replayed (``block_graphs.py``).

As in whole steps, a batch runs with the same sizes whether it is replayed or not. All graphs share
their memory, so one call of a forward pass is replayed, until the next forward pass begins.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.block_calls import describe_mode, may_record
from rapidformer.accel.cuda_graph.block_graphs import hash_places
from rapidformer.accel.cuda_graph.capture import CudaCapture, describe_error
from rapidformer.accel.cuda_graph.inputs import (
    Inputs,
    NotRepeatableError,
    StaticInputs,
    read_inputs,
)
from rapidformer.accel.cuda_graph.passes import Request, Snapshot, get_numbers
from rapidformer.accel.cuda_graph.recorded_block import GradientMemory, RecordedBlock
from rapidformer.accel.cuda_graph.replayed_code import ReplayedCode
from rapidformer.accel.cuda_graph.stacks import Recorded
from rapidformer.accel.cuda_graph.widths import Widths
from rapidformer.accel.unpad.calls import note_mode
from rapidformer.accel.unpad.promises import reading_no_padding, reads_no_padding
from rapidformer.compat.torch_dispatch import tree_leaves
from rapidformer.compat.torch_modules import get_tables
from rapidformer.compat.torch_tensors import count_changes
from rapidformer.data.batch import NO_BATCH, count_rows
from rapidformer.data.nested import iterate_tensors
from rapidformer.data.update import MicroBatch, MicroBatchResult, Update
from rapidformer.optim.gradients import take_gradients
from rapidformer.overlay import extend, list_layers, remove

_MOST_UNROUNDED = 4
"""With more sizes than these, blocks are better: they round up the number of tokens alone."""


class _Batch:
    """The arguments of a call at fixed places in memory, with the sizes that a graph has."""

    args: tuple[Any, ...] = ()
    trained: Sequence[Tensor] = ()

    def __init__(self, inputs: Inputs, device: torch.device) -> None:
        self.inputs, self._device = inputs, device

    @functools.cached_property
    def _static(self) -> StaticInputs:
        return StaticInputs(self.inputs, self._device)

    @property
    def kwargs(self) -> dict[str, Any]:
        batch: dict[str, Any] = self._static.batch
        return batch

    def shifted(self) -> AbstractContextManager[None]:
        """Inside, it is another batch."""
        return self._static.shifted()

    def fill(self, call: _Batch) -> None:
        """Copy in another batch of the same sizes."""
        self._static.fill(call.inputs)


class ModelPasses:
    """A model on inputs of one size, in the precision that it is called in."""

    def __init__(
        self, model: nn.Module, run: Callable[..., Any], static: _Batch,
        parameters: Sequence[nn.Parameter], device: torch.device,
    ) -> None:  # fmt: skip
        self.modules, self.static, self.parameters, self._run = [model], static, parameters, run
        self._enter_mode, self._promises = note_mode(device), reads_no_padding()

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


class _Places:
    """Which weights a model has, and where they are in memory: a graph is valid for these."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tables: list[dict[str, Any]] = []
        self._known: Hashable = None
        self.weights: list[nn.Parameter] = []

    def have_changed(self) -> bool:
        """Whether any were replaced, moved, frozen or unfrozen since the last time."""
        if self._known == self._read():
            return False
        self._tables = [table for module in self._model.modules() for table in get_tables(module)]
        self.weights = list(self._model.parameters())
        self._known = self._read()
        return True

    def _read(self) -> Hashable:
        members = itertools.chain.from_iterable(table.values() for table in self._tables)
        return hash(tuple(map(id, members))), hash_places(self.weights)


def _build_replayed(reference: weakref.ref[ModelGraphs], cls: Any) -> dict[str, Any]:
    """The members of the overlay. A copy of the model has them, too: it must keep nothing alive."""

    @functools.wraps(cls.forward)  # trainers read the signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        graphs = None if torch.compiler.is_compiling() else reference()
        if graphs is None or self is not graphs.model:
            return cls.forward(self, *args, **kwargs)
        return graphs.call(*args, **kwargs)

    return {"forward": forward}


class ModelGraphs:
    """The graphs of a model's passes, in training."""

    most_weights: float = 2**31
    """In bytes: gradients lie in memory twice."""
    most_sizes = 16
    """For how many sizes of a micro-batch a model is recorded."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        capture: CudaCapture,
    ) -> None:
        self.model, self.device, self.capture = model, capture.device, capture
        self._places = _Places(model)
        self.parameters: list[nn.Parameter] = []
        """The trainable ones."""
        self._code = ReplayedCode((), model)
        self._described: Hashable = None
        """What the code depends on in this call."""
        self._widths = Widths(
            model, parameters, self.device, is_16_bit=capture.is_16_bit, warns=False
        )
        self._gradients = GradientMemory(self.device)
        self._recorded: dict[Hashable, Recorded] = {}
        self._unrounded: set[int] = set()
        """Hashes of keys whose sizes are not of the few that batches are rounded up to."""
        self.number = 0
        self._is_running = self._has_run = self._is_known = False
        self._run: Callable[..., Any] = model.forward
        self.problem: str | None = None
        """Why the model is not replayed; None while it may be."""
        effect, size = self._code.examination.effect, sum(p.nbytes for p in model.parameters())
        if effect is not None:
            self.problem = str(effect)
        elif size > self.most_weights:
            self.problem = "it is large, so launching kernels costs little"
        else:  # inside its hooks and autocast, which surround ``forward``
            extend(model, "replay", functools.partial(_build_replayed, weakref.ref(self)))

    @property
    def count(self) -> int:
        """For how many sizes the model is replayed."""
        return len(self._recorded)

    @property
    def description(self) -> str:
        """What is replayed."""
        return "the model's passes"

    def close(self) -> None:
        """Let the model run as it did before."""
        self._stop("the engine is closed")

    def give_up(self, problem: str) -> None:
        """Run the model as it is from now on."""
        self._stop(problem)

    def _stop(self, problem: str) -> None:
        if self.problem is not None:
            return
        self.problem, self._is_running = problem, False
        self.end()  # recordings of blocks use the same memory
        self._recorded.clear()
        self._gradients, self.parameters = GradientMemory(self.device), []
        if "replay" in list_layers(self.model):
            remove(self.model, "replay")

    @contextmanager
    def passing(self, *, begins: bool = True) -> Iterator[None]:
        """Inside, the forward pass of a micro-batch runs or goes on; a backward pass follows."""
        if begins:
            self.begin()
        self._is_running = self.problem is None
        try:
            yield
        finally:
            self._is_running = False
        if not self._has_run and not self._recorded:
            self.give_up("a step does not call it")

    def begin(self) -> None:
        """A forward pass begins."""
        self.number += 1
        self._has_run = False

    def end(self) -> None:
        """What the forward pass has left for its backward pass is gone."""
        self.number += 1

    def begin_call(self) -> None:
        """The model is called."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        if not self.is_replayed():
            return self._run(*args, **kwargs)
        self.begin_call()
        try:
            if self._places.have_changed():
                self._recorded.clear()
                self.parameters = [p for p in self._places.weights if p.requires_grad]
            self.check_call(args, kwargs)
            self._described = self._code.describe()
            inputs = self.read(kwargs)
            if inputs is None:
                return self._run(**kwargs)
            return self._replay(inputs) if self._is_known else self._run_first(inputs)
        except NotRepeatableError as problem:
            self.give_up(str(problem))
        return self._run(*args, **kwargs)

    def is_replayed(self) -> bool:
        """Whether the model may be replayed if it is called now."""
        return self._is_running and may_record()

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call that a replay cannot replace."""
        if args:
            raise NotRepeatableError("it is called with positional arguments")
        if any(tensor.requires_grad for tensor in iterate_tensors(kwargs)):
            raise NotRepeatableError("its inputs have gradients")
        if self._has_run:
            raise NotRepeatableError("it is called more than once in a step")
        self._has_run = True
        self._code.check_hooks(self.parameters if torch.is_grad_enabled() else ())

    def _run_first(self, inputs: Inputs) -> Any:
        """The first pass, which may still set things up, with the sizes of later ones."""
        before, output = self._take_snapshot(), self._run_sized(inputs)
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
        before = self._take_snapshot()
        try:
            return _run_checked(self._run, _Batch(inputs, self.device).kwargs)
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
            return self._widths.may_change(request, [inputs], self._take_snapshot)
        finally:
            for parameter, gradient in zip(self.parameters, held, strict=True):
                parameter.grad = gradient

    def _take_snapshot(self) -> Snapshot:
        return Snapshot(self._code.examination.list_tensors(), self.device)

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
        call, number, numbers = _Batch(inputs, self.device), self.number, get_numbers(self.device)
        return self._recorded[key].replay(call, numbers, lambda: number == self.number)

    def _record(self, inputs: Inputs) -> Recorded:
        static, before = _Batch(inputs, self.device), self._take_snapshot()
        passes = ModelPasses(self.model, self._run, static, self.parameters, self.device)
        try:
            return self.record(passes, before)
        except Exception as error:
            # Whatever it is, the model itself runs next: if it fails, too, the user sees that.
            raise NotRepeatableError(describe_error(error)) from None
        finally:
            before.restore()

    def record(self, passes: ModelPasses, before: Snapshot) -> Recorded:
        """Record passes; ``before`` is the state in which they begin."""
        recorded = RecordedBlock(passes, self.capture, self._gradients, before)
        recorded.record_backward()
        recorded.release()
        return recorded


def check_output(output: Any, batch: Mapping[str, Any]) -> None:
    """Refuse outputs with a value for each token: their width would be that of the graph."""
    rows = count_rows(batch)
    widths = {tensor.shape[1] for tensor in iterate_tensors(batch) if tensor.dim() > 1}
    for leaf in tree_leaves(output):
        is_plain = type(leaf) is Tensor and leaf.dim() <= 2
        is_by_row = is_plain and leaf.shape[:1] in ((), (rows,)) and not widths & {*leaf.shape[1:]}
        if leaf is not None and not is_by_row:
            raise NotRepeatableError("it returns more than a few numbers for each row")
