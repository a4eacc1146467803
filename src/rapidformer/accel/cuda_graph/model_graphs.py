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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.block_calls import describe_mode
from rapidformer.accel.cuda_graph.block_graphs import Recorded, hash_places
from rapidformer.accel.cuda_graph.inputs import (
    Inputs,
    NotRepeatableError,
    StaticInputs,
    read_inputs,
)
from rapidformer.accel.cuda_graph.passes import Request, Snapshot, get_numbers
from rapidformer.accel.cuda_graph.recorded_block import GradientMemory, RecordedBlock
from rapidformer.accel.cuda_graph.recorder import CudaCapture, choose_rounding, describe_error
from rapidformer.accel.cuda_graph.replayed_code import ReplayedCode
from rapidformer.accel.cuda_graph.widths import Widths
from rapidformer.accel.unpad.calls import note_mode
from rapidformer.accel.unpad.promises import reading_no_padding, reads_no_padding
from rapidformer.compat.torch_dispatch import tree_leaves
from rapidformer.data.batch import NO_BATCH
from rapidformer.data.update import MicroBatch, MicroBatchResult, Update
from rapidformer.optim.gradients import take_gradients
from rapidformer.overlay import extend, list_layers, remove

_MOST_UNROUNDED = 4
"""With more sizes than these, blocks are better: they round up the number of tokens alone."""


class _Call:
    """The batch of one call."""

    args: tuple[Any, ...] = ()
    trained: Sequence[Tensor] = ()

    def __init__(self, inputs: Inputs, device: torch.device) -> None:
        self.inputs, self.device = inputs, device

    @property
    def kwargs(self) -> dict[str, Any]:
        """The batch in memory of its own, with the sizes that a graph has."""
        batch: dict[str, Any] = StaticInputs(self.inputs, self.device).batch
        return batch


class _Static:
    """A batch at fixed places in memory."""

    args: tuple[Any, ...] = ()
    trained: Sequence[Tensor] = ()

    def __init__(self, inputs: Inputs, device: torch.device) -> None:
        self._inputs = StaticInputs(inputs, device)

    @property
    def kwargs(self) -> dict[str, Any]:
        batch: dict[str, Any] = self._inputs.batch
        return batch

    def shifted(self) -> AbstractContextManager[None]:
        return self._inputs.shifted()

    def fill(self, call: _Call) -> None:
        self._inputs.fill(call.inputs)


class Passes:
    """A model on inputs of one size, in the precision that it is called in."""

    def __init__(
        self, run: Callable[..., Any], static: _Static, parameters: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:  # fmt: skip
        self.static, self.parameters, self._run = static, parameters, run
        self._enter_mode, self._promises = note_mode(device), reads_no_padding()

    def run(self, **kwargs: Any) -> Any:
        promise = reading_no_padding() if self._promises else nullcontext()
        with self._enter_mode(), promise:
            output = self._run(**kwargs)
        check_output(output, kwargs)
        return output


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
        device: torch.device,
        capture: CudaCapture,
        *,
        is_16_bit: bool,
        compiles: bool,
    ) -> None:
        self.model, self.device, self.capture = model, device, capture
        self._weights = list(model.parameters())
        self.parameters: list[nn.Parameter] = []
        """Those that are trained."""
        self._compiles, self.rounding = compiles, choose_rounding(is_16_bit=is_16_bit)
        self._code = ReplayedCode((), model)
        self._widths = Widths(model, parameters, device, is_16_bit=is_16_bit)
        self._gradients = GradientMemory(device)
        self._recorded: dict[Hashable, Recorded] = {}
        self._unrounded: set[int] = set()
        """Hashes of keys whose sizes are not of the few that batches are rounded up to."""
        self._places: Hashable = None
        self.number = 0
        self._is_running = self._has_run = False
        self._run: Callable[..., Any] = model.forward
        self.problem: str | None = None
        """Why the model is not replayed; None while it may be."""
        effect, size = self._code.examination.effect, sum(p.nbytes for p in self._weights)
        if effect is not None:
            self.problem = str(effect)
        elif size > self.most_weights:
            self.problem = "it is large, so launching kernels costs little"
        else:  # inside its hooks and autocast, which surround ``forward``
            extend(model, "replay", self._build)

    def _build(self, cls: Any) -> dict[str, Any]:
        @functools.wraps(cls.forward)  # trainers read the signature
        def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if model is not self.model:  # a copy of it
                return cls.forward(model, *args, **kwargs)
            return self._call(*args, **kwargs)

        return {"forward": forward}

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
        self._recorded.clear()
        if "replay" in list_layers(self.model):
            remove(self.model, "replay")

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside, the forward pass of a micro-batch runs, which a backward pass follows."""
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

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        if not self.is_replayed():
            return self._run(*args, **kwargs)
        try:
            self._check_call(args, kwargs)
            if self.number == 1:
                return self._run_first(**kwargs)
            inputs = self._read(kwargs)
            return self._run(**kwargs) if inputs is None else self._replay(inputs)
        except NotRepeatableError as problem:
            self.give_up(str(problem))
        return self._run(*args, **kwargs)

    def is_replayed(self) -> bool:
        """Whether the model may be replayed if it is called now."""
        return self._is_running and torch.is_grad_enabled()

    def _check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args:
            raise NotRepeatableError("it is called with arguments that have no names")
        if any(isinstance(value, Tensor) and value.requires_grad for value in kwargs.values()):
            raise NotRepeatableError("its inputs have gradients")
        if self._has_run:
            raise NotRepeatableError("it is called more than once in a step")
        self._has_run = True
        self._code.check_hooks(())

    def _run_first(self, **kwargs: Any) -> Any:
        """The first pass, which may still set things up."""
        output = self._run(**kwargs)
        try:
            check_output(output, kwargs)
        except NotRepeatableError as problem:
            self.give_up(str(problem))
        return output

    def _read(self, kwargs: dict[str, Any]) -> Inputs | None:
        """The inputs of a call; None if it must run as it is."""
        places = hash_places(self._weights)
        if places != self._places:  # weights have moved in memory, or were frozen or unfrozen
            self._recorded.clear()
            self._places = places
            self.parameters = [weight for weight in self._weights if weight.requires_grad]
        inputs = read_inputs(self.model, kwargs)
        if not self.may_change(kwargs, inputs):
            raise NotRepeatableError("what it returns depends on the width of a batch")
        return inputs

    def may_change(self, kwargs: dict[str, Any], inputs: Inputs | None) -> bool:
        """Whether a call may have these inputs instead of its own, which may be narrower."""
        batch = MicroBatch(kwargs, NO_BATCH, False, True, 0, 0)
        request = Request(self._run_compared, Update((batch,)), [1.0], self._code.describe(), None)
        held = take_gradients(self.parameters)  # of other micro-batches
        is_exact = self._widths.may_change(request, [inputs], self._take_snapshot)
        for parameter, gradient in zip(self.parameters, held, strict=True):
            parameter.grad = gradient
        return is_exact

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
        key = (inputs.key, self._code.describe(), describe_mode(self.device))
        call = _Call(inputs, self.device)
        if key not in self._recorded:
            is_due = inputs.is_rounded or hash(key) in self._unrounded
            if not is_due:
                self._unrounded.add(hash(key))
            if len(self._unrounded) > _MOST_UNROUNDED:
                raise NotRepeatableError("its batches have many sizes")
            if not is_due or len(self._recorded) >= self.most_sizes:
                return self._run(**(call.kwargs if inputs.is_changed else inputs.batch))
            self._recorded[key] = self._record(inputs)
        number, numbers = self.number, get_numbers(self.device)
        return self._recorded[key].replay(call, numbers, lambda: number == self.number)

    def _record(self, inputs: Inputs) -> Recorded:
        static, before = _Static(inputs, self.device), self._take_snapshot()
        passes = Passes(self._run, static, self.parameters, self.device)
        try:
            return self.record(passes, before)
        except Exception as error:
            # Whatever it is, the model itself runs next: if it fails, too, the user sees that.
            raise NotRepeatableError(describe_error(error)) from None
        finally:
            before.restore()

    def record(self, passes: Passes, before: Snapshot) -> Recorded:
        """Record passes; ``before`` is the state in which they begin."""
        recorded = RecordedBlock(
            passes, self.capture, self._gradients, before, rounding=self.rounding,
            forbids_reads=not self._compiles,
        )  # fmt: skip
        recorded.record_backward()
        recorded.release()
        return recorded


def check_output(output: Any, batch: Mapping[str, Any]) -> None:
    """Refuse outputs with a value for each token: their width would be that of the graph."""
    wide = [value for value in batch.values() if isinstance(value, Tensor) and value.dim() > 1]
    widths = {value.shape[1] for value in wide}
    for leaf in tree_leaves(output):
        is_small = type(leaf) is Tensor and leaf.dim() <= 2 and not widths & {*leaf.shape[1:]}
        if leaf is not None and not is_small:
            raise NotRepeatableError("it returns more than a few numbers for each row")
