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

MOST_SIZES = 16
"""For how many sizes of a micro-batch a model is recorded."""
MOST_WEIGHTS = 2**31
"""In bytes: gradients lie in memory twice."""


class _Call:
    """The batch of one call."""

    args: tuple[Any, ...] = ()
    trained: Sequence[Tensor] = ()

    def __init__(self, inputs: Inputs, device: torch.device) -> None:
        self.inputs, self._device = inputs, device

    @property
    def kwargs(self) -> dict[str, Any]:
        """The batch in memory of its own, with the sizes that a graph has."""
        batch: dict[str, Any] = StaticInputs(self.inputs, self._device).batch
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


class _Passes:
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
        self._model, self._device, self.capture = model, device, capture
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._compiles, self._rounding = compiles, choose_rounding(is_16_bit=is_16_bit)
        self._code = ReplayedCode((), model)
        self._widths = Widths(model, parameters, device, is_16_bit=is_16_bit)
        self._gradients = GradientMemory(device)
        self._recorded: dict[Hashable, RecordedBlock] = {}
        self._seen: set[int] = set()
        self._places: Hashable = None
        self._number = 0
        self._is_running = self._has_run = False
        self._run: Callable[..., Any] = model.forward
        self._forward_before = vars(model).get("forward")
        self.problem: str | None = None
        """Why the model is not replayed; None while it may be."""
        effect, size = self._code.examination.effect, sum(p.nbytes for p in self._parameters)
        if effect is not None:
            self.problem = str(effect)
        elif size > MOST_WEIGHTS:
            self.problem = "it is large, so launching kernels costs little"
        else:
            self._install()

    def _install(self) -> None:
        """Take the place of the model's forward pass, inside its hooks and autocast."""

        @functools.wraps(self._run)  # trainers read the signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        vars(self._model)["forward"] = forward

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
        if vars(self._model).get("forward") is not None and self.problem is None:
            del vars(self._model)["forward"]
            if self._forward_before is not None:
                vars(self._model)["forward"] = self._forward_before
        self.problem = self.problem or "the engine is closed"
        self._recorded.clear()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside, the forward pass of a micro-batch runs, which a backward pass follows."""
        self._number += 1
        self._is_running, self._has_run = self.problem is None, False
        try:
            yield
        finally:
            self._is_running = False

    def give_up(self, problem: str) -> None:
        """Run the model as it is from now on."""
        self.close()
        self.problem = problem
        self._is_running = False

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        if not self._is_running or not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        try:
            self._check_call(args, kwargs)
            if self._number == 1:
                return self._run_first(**kwargs)
            inputs = self._read(kwargs)
            return self._run(**kwargs) if inputs is None else self._replay(inputs)
        except NotRepeatableError as problem:
            self.give_up(str(problem))
        return self._run(*args, **kwargs)

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
        places = hash((*map(Tensor.data_ptr, self._parameters), *self._list_trained()))
        if places != self._places:  # weights have moved in memory, or were frozen or unfrozen
            self._recorded.clear()
            self._places = places
        inputs = read_inputs(self._model, kwargs)
        batch = MicroBatch(kwargs, NO_BATCH, False, True, 0, 0)
        request = Request(self._run_compared, Update((batch,)), [1.0], self._code.describe(), None)
        held = take_gradients(self._parameters)  # of other micro-batches
        is_exact = self._widths.may_change(request, [inputs], self._take_snapshot)
        for parameter, gradient in zip(self._parameters, held, strict=True):
            parameter.grad = gradient
        if not is_exact:
            raise NotRepeatableError("what it returns depends on the width of a batch")
        return inputs

    def _list_trained(self) -> Iterator[bool]:
        return (parameter.requires_grad for parameter in self._parameters)

    def _take_snapshot(self) -> Snapshot:
        return Snapshot(self._code.examination.list_tensors(), self._device)

    def _run_compared(self, micro_batch: MicroBatch) -> MicroBatchResult:
        """A sum of all that the model returns, to see whether more columns change something."""
        output = self._run(**micro_batch.batch)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        sums = [tensor.float().sum() for tensor in tensors if tensor.is_floating_point()]
        return MicroBatchResult(loss=torch.stack(sums).sum(), weight=1.0)

    def _replay(self, inputs: Inputs) -> Any:
        key = (inputs.key, self._code.describe(), describe_mode(self._device))
        call = _Call(inputs, self._device)
        if key not in self._recorded:
            is_due = inputs.is_rounded or hash(key) in self._seen
            self._seen.add(hash(key))
            if not is_due or len(self._recorded) >= MOST_SIZES:
                return self._run(**(call.kwargs if inputs.is_changed else inputs.batch))
            self._recorded[key] = self._record(inputs)
        number, numbers = self._number, get_numbers(self._device)
        return self._recorded[key].replay(call, numbers, lambda: number == self._number)

    def _record(self, inputs: Inputs) -> RecordedBlock:
        static, before = _Static(inputs, self._device), self._take_snapshot()
        passes = _Passes(self._run, static, self._parameters, self._device)
        try:
            recorded = RecordedBlock(
                passes, self.capture, self._gradients, before, rounding=self._rounding,
                forbids_reads=not self._compiles,
            )  # fmt: skip
            recorded.record_backward()
        except Exception as error:
            # Whatever it is, the model itself runs next: if it fails, too, the user sees that.
            raise NotRepeatableError(describe_error(error)) from None
        finally:
            before.restore()
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
