"""The graphs of a chain of blocks or a model: recorded, compared with it, and replayed."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rapidformer.accel.cuda_graph.block_calls import without_cast_cache
from rapidformer.accel.cuda_graph.capture import CudaCapture
from rapidformer.accel.cuda_graph.comparing import check_replay
from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.cuda_graph.snapshot import Snapshot, get_numbers, set_numbers
from rapidformer.compat.torch_dispatch import tree_leaves, tree_map_only
from rapidformer.compat.torch_modules import get_tables
from rapidformer.compat.torch_tensors import copy_all, cut_like

_ALIGNMENT = 128
"""In elements: where a gradient begins."""


GradientMemory = dict[torch.dtype, Tensor]
"""Where graphs leave the gradients of parameters until they are copied, all in one place."""


class _Layout:
    """Where the gradients of some parameters lie, one after the other for each dtype."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._places: list[tuple[torch.dtype, int]] = []
        """For each parameter, its number among the templates of its dtype."""
        self._templates: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        """Parameters, and gaps that align the next one."""
        for parameter in parameters:
            templates, gap = self._templates[parameter.dtype], -parameter.numel() % _ALIGNMENT
            self._places.append((parameter.dtype, len(templates)))
            templates.append(torch.empty(parameter.shape, device="meta"))
            if gap:
                templates.append(torch.empty(gap, device="meta"))
        self.sizes = {d: sum(t.numel() for t in some) for d, some in self._templates.items()}
        """In elements."""

    def reserve(self, memory: GradientMemory, device: torch.device) -> GradientMemory:
        """As much of this memory as they need; it grows if that is more than there is."""
        for dtype, size in self.sizes.items():
            if dtype not in memory or len(memory[dtype]) < size:
                memory[dtype] = torch.empty(size, dtype=dtype, device=device)
        return {dtype: memory[dtype][:size] for dtype, size in self.sizes.items()}

    def cut(self, memory: GradientMemory) -> list[Tensor]:
        """The place of each parameter's gradient."""
        parts = {d: cut_like(whole, self._templates[d]) for d, whole in memory.items()}
        return [parts[dtype][number] for dtype, number in self._places]


class Recordable(Protocol):
    """Something to record: a chain of blocks, or a model."""

    @property
    def static(self) -> Any:
        """Its arguments at fixed places: ``StaticCall`` or ``StaticInputs``."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...
    @property
    def modules(self) -> Sequence[nn.Module]:
        """Whose parameters these are."""

    def run(self, *args: Any, **kwargs: Any) -> Any: ...


class _StandIns:
    """Parameters that take the place of the real ones in recordings, with the same memory.

    A loss that a script keeps may hold autograd's nodes of the real ones. These belong to another
    stream than recordings, and would end them.
    """

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [_stand_in(parameter) for parameter in parameters]
        known = dict(zip(map(id, parameters), self.parameters, strict=True))
        inside = itertools.chain.from_iterable(module.modules() for module in modules)
        self._places = [
            (table, name, real, known[id(real)])
            for table, _ in map(get_tables, inside)
            for name, real in table.items()
            if id(real) in known
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, modules compute with them."""
        for table, name, _, other in self._places:
            table[name] = other
        try:
            yield
        finally:
            for table, name, real, _ in self._places:
                table[name] = real


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    if type(parameter) is not nn.Parameter:
        return parameter
    other = nn.Parameter(parameter.detach(), parameter.requires_grad)
    vars(other).update(vars(parameter))  # what overlays know about it
    return other


@dataclass(frozen=True)
class _Slot:
    """Stands for an output tensor."""

    number: int


class RecordedForward:
    """The forward pass of a chain of blocks, or of a model, as a graph."""

    def __init__(self, part: Recordable, capture: CudaCapture, before: Snapshot) -> None:
        """Record it; ``before`` is the state in which it begins."""
        self._part, self._static, self._capture = part, part.static, capture
        self._form: Any = None
        with without_cast_cache():
            with self._static.shifted():
                expected = capture.warm_up(self._rehearse, forbids_reads=not capture.compiles)
            before.host_numbers.count_unused(0)
            before.restore()
            self.outputs, self._replay_forward = capture.record(self._run_forward)
            before.restore()
            with self._static.shifted():
                self._replay_forward()
                check_replay(self.outputs, expected, "outputs", is_16_bit=capture.is_16_bit)
        before.restore()

    def _rehearse(self) -> list[Tensor]:
        """Everything that will be recorded, without a graph; returns the outputs."""
        return self._run_forward()

    def _run_forward(self) -> list[Tensor]:
        args, kwargs = self._static.arguments
        output, numbers = self._part.run(*args, **kwargs), itertools.count()
        self._form = tree_map_only(Tensor, lambda _: _Slot(next(numbers)), output)
        return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]

    def replay(self, call: Any, numbers: Tensor, is_current: Callable[[], bool]) -> Any:
        """The output of this call, which begins with these random numbers.

        ``is_current`` says whether its forward pass is still the last one.
        """
        self._static.fill(call)
        self._replay_forward()
        # Copies, which the next replay does not overwrite.
        return self._fill_form([output.clone() for output in self.outputs])

    def _fill_form(self, values: Sequence[Tensor]) -> Any:
        return tree_map_only(_Slot, lambda slot: values[slot.number], self._form)


class RecordedBlock(RecordedForward):
    """The forward and backward pass of a chain of blocks, or of a model, as graphs."""

    def __init__(
        self, part: Recordable, capture: CudaCapture, memory: GradientMemory, before: Snapshot
    ) -> None:
        """Record the forward pass; ``before`` is the state in which it begins."""
        self.parameters, self._before = part.parameters, before
        if not all(parameter.numel() for parameter in part.parameters):
            raise NotRepeatableError("a parameter is empty")
        self._stand_ins = _StandIns(part.modules, part.parameters)
        self._layout = _Layout(part.parameters)
        self._memory = self._layout.reserve(memory, capture.device)
        self._live: list[Tensor] = []
        """The output tensors with what autograd saved for them, until they are released."""
        self.is_trained: list[bool] = []
        """Which outputs have a gradient."""
        self._gradients: list[Tensor] = []
        """Where the gradients of the outputs are read."""
        self._of_inputs: list[Tensor] = []
        self._has_gradient: list[bool] = []
        self._reached: list[list[bool]] = []
        """For each output with a gradient: which inputs and parameters it depends on."""
        self._rehearsed: list[Tensor | None] = []
        """The gradients of inputs and parameters, until they are compared."""
        self._replay_backward: Callable[[], None]
        super().__init__(part, capture, before)

    def _run_forward(self) -> list[Tensor]:
        with self._stand_ins.in_place():
            self._live = super()._run_forward()
        self.is_trained = [tensor.requires_grad for tensor in self._live]
        return [tensor.detach() for tensor in self._live]

    def _run_backward(self) -> list[Tensor]:
        found = self._differentiate()
        self._has_gradient = [gradient is not None for gradient in found]
        count = len(self._static.trained)
        pairs = zip(self._layout.cut(self._memory), found[count:], strict=True)
        held = [(place, gradient) for place, gradient in pairs if gradient is not None]
        copy_all([place for place, _ in held], [gradient for _, gradient in held])
        return [gradient for gradient in found[:count] if gradient is not None]

    def _differentiate(self, number: int | None = None) -> list[Tensor | None]:
        """The gradients of all outputs, or of one of them alone."""
        outputs = [tensor for tensor in self._live if tensor.requires_grad]
        wanted = [*self._static.trained, *self._stand_ins.parameters]
        some = slice(None) if number is None else slice(number, number + 1)
        found: Any = torch.autograd.grad(
            outputs[some], wanted, self._gradients[some], allow_unused=True,
            retain_graph=number is not None,
        )  # fmt: skip
        return list(found)

    def _rehearse(self) -> list[Tensor]:
        """Both passes without a graph."""
        outputs = self._run_forward()
        self._gradients = [torch.randn_like(each) for each in self._live if each.requires_grad]
        if not self._gradients:
            raise NotRepeatableError("none of its outputs has a gradient")
        self._check_reached()
        count = len(self._gradients)
        self._reached = [
            [gradient is not None for gradient in self._differentiate(number)]
            for number in range(count if count > 1 else 0)
        ]
        self._rehearsed = self._differentiate()
        return outputs

    def _check_reached(self) -> None:
        """Raises if modules keep a parameter elsewhere, too: its gradient would be missing."""
        pairs = zip(self.parameters, self._stand_ins.parameters, strict=True)
        replaced = [real for real, other in pairs if real is not other]
        if not replaced:
            return
        outputs = [tensor for tensor in self._live if tensor.requires_grad]
        found = torch.autograd.grad(
            outputs, replaced, self._gradients, allow_unused=True, retain_graph=True
        )
        if any(gradient is not None for gradient in found):
            raise NotRepeatableError("a module keeps a parameter where torch does not look")

    def record_backward(self) -> None:
        """Record the backward pass."""
        with without_cast_cache():
            self._of_inputs, self._replay_backward = self._capture.record(self._run_backward)
            with self._static.shifted():
                self._before.restore()
                self._replay_forward()
                self._replay_backward()
                check_replay(
                    self._list_gradients(),
                    self._rehearsed,
                    "gradients",
                    is_16_bit=self._capture.is_16_bit,
                )
        self._before.restore()
        self._rehearsed = []

    def release(self) -> None:
        """Let other recordings use the memory of what autograd saved."""
        self._live = []

    def replay(self, call: Any, numbers: Tensor, is_current: Callable[[], bool]) -> Any:
        """The output of this call, which begins with these random numbers."""
        self._static.fill(call)
        again = functools.partial(self._run_again, call, numbers)
        self._replay_forward()
        values = _Replay.apply(self, again, is_current, *call.trained, *self.parameters)
        return self._fill_form(values)

    def go_back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of inputs and parameters from those of outputs; None: one is not used."""
        for place, gradient in zip(self._gradients, gradients, strict=True):
            place.zero_() if gradient is None else place.copy_(gradient)
        self._replay_backward()
        found = self._list_gradients()
        if all(gradient is not None for gradient in gradients):
            return found
        # What only unused outputs depend on has no gradient: the optimizer leaves it alone.
        used = [
            reached for reached, g in zip(self._reached, gradients, strict=True) if g is not None
        ]
        return [x if any(reach) else None for x, *reach in zip(found, *used, strict=True)]

    def _list_gradients(self) -> list[Tensor | None]:
        count = len(self._static.trained)
        of_inputs = (tensor.clone() for tensor in self._of_inputs)
        found: list[Tensor | None] = [
            next(of_inputs) if has_gradient else None for has_gradient in self._has_gradient[:count]
        ]
        fresh = {dtype: whole.clone() for dtype, whole in self._memory.items()}
        copied = self._layout.cut(fresh)
        pairs = zip(copied, self._has_gradient[count:], strict=True)
        return found + [copy if has_gradient else None for copy, has_gradient in pairs]

    def _run_again(
        self, call: Any, numbers: Tensor, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The same without a graph, from the random numbers that the call began with."""
        creates_graph, now = torch.is_grad_enabled(), get_numbers(self._capture.device)
        aliases: dict[int, Tensor] = {}

        def alias(tensor: Tensor) -> Tensor:
            # Hooks on the tensor itself run when the caller computes its gradient, not here.
            if not tensor.requires_grad:
                return tensor
            return aliases.setdefault(id(tensor), tensor.view_as(tensor))

        set_numbers(numbers, self._capture.device)
        try:
            with torch.enable_grad():
                args, kwargs = tree_map_only(Tensor, alias, self._static.read(call))
                output = self._part.run(*args, **kwargs)
        finally:
            set_numbers(now, self._capture.device)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        wanted = [*(aliases[id(tensor)] for tensor in call.trained), *self.parameters]
        pairs = zip(itertools.compress(tensors, self.is_trained), gradients, strict=True)
        outputs, given = zip(*((o, g) for o, g in pairs if g is not None), strict=True)
        found: Any = torch.autograd.grad(
            outputs, wanted, given, create_graph=creates_graph, allow_unused=True
        )
        return list(found)


class _Replay(torch.autograd.Function):
    """A block that was replayed, as one operation."""

    @staticmethod
    def forward(
        ctx: Any, recorded: RecordedBlock, run_again: Any, is_current: Any, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.recorded, ctx.run_again, ctx.is_current = recorded, run_again, is_current
        ctx.set_materialize_grads(False)
        ctx.is_first = True  # a backward pass uses the memory of what it needs no more
        ctx.save_for_backward(*tensors)
        # Copies, which the next replay does not overwrite.
        outputs = [tensor.clone() for tensor in recorded.outputs]
        pairs = zip(outputs, recorded.is_trained, strict=True)
        ctx.mark_non_differentiable(*(output for output, is_trained in pairs if not is_trained))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        recorded: RecordedBlock = ctx.recorded
        assert ctx.saved_tensors  # torch looks whether something has changed them
        given = list(itertools.compress(gradients, recorded.is_trained))
        is_first, ctx.is_first = ctx.is_first, False
        if is_first and ctx.is_current() and not torch.is_grad_enabled():
            return None, None, None, *recorded.go_back(given)
        return None, None, None, *ctx.run_again(given)
