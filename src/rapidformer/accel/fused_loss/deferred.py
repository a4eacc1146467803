"""Logits that are computed only if something other than a cross entropy needs them.

In training, the head returns ``DeferredLogits``. They know their shape, record the reshaping,
shifting and scaling that models and losses do, and compute a cross entropy chunk by chunk. Any
other operation computes all of them, as the head would have. So a model's own loss, a user's loss
over ``outputs.logits`` and an accuracy printed now and then all work unchanged.

Logits and their views are computed together, as real views of each other: whatever changes one of
them in place changes the others, as it would without this switch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from rapidformer.accel.fused_loss.chunked import Recipe, Step
from rapidformer.accel.fused_loss.head import DATA_ACCESS, Head, watch_steps
from rapidformer.accel.unpad.on_demand import Unpadded, map_tokens, note_version, settle
from rapidformer.compat.patches import Change
from rapidformer.compat.torch_compile import break_graph, is_tracing, untraced
from rapidformer.compat.torch_dispatch import (
    convert_function_arguments,
    has_saved_tensor_hooks,
    tree_leaves,
    tree_map_only,
    without_torch_function,
)
from rapidformer.compat.torch_tensors import FACTS, get_storage_key
from rapidformer.errors import ConfigurationError
from rapidformer.log import say_once
from rapidformer.models.watched import is_from_user

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of logits that can be deferred. Losses are computed in fp32."""


class DeferredLogits(torch.Tensor):
    """The outputs of a head that has not been applied yet."""

    _head: Head
    _hidden: Tensor
    """Same shape as the logits, except for the last dimension."""
    _steps: tuple[Step, ...]
    _layout: Tensor
    """A tensor on the meta device with the strides that the logits will have."""
    _has_gradient: bool
    """False if they were derived under ``no_grad``."""
    _viewed: tuple[DeferredLogits, Step] | None
    """What these logits are a view of, and how; None if they have their own memory."""
    _views: list[weakref.ref[DeferredLogits]]
    _computed: Tensor | None
    _is_followed: bool
    """Whether something was derived without computing the logits: it is too late for hooks then."""

    def get_hidden(self) -> Tensor:
        """What the head is applied to.

        Its gradient runs the hooks that were registered on the logits: FSDP puts one on every
        output of the model, to gather weights.
        """
        self._is_followed = True
        return self._pass_hidden()

    def compute(self) -> Tensor:
        """The logits as a plain tensor, with their gradient."""
        if self._computed is None and self._viewed is not None:
            self._viewed[0].compute()
        elif self._computed is None:
            # With a gradient even under no_grad: the result is kept, and a loss may use it later.
            # Saved tensors bypass hooks for the same reason: a checkpointed loss that computes the
            # logits finds them computed when it runs again.
            with _gradients(self._has_gradient), saved_tensors_hooks(note_version, _unpack):
                logits = self._head.compute(self._pass_hidden())
                for step in self._steps:
                    logits = step(logits)
            self._keep(logits)
        assert self._computed is not None
        return self._computed

    def _keep(self, logits: Tensor) -> None:
        """Keep computed logits, and give every view its part of them."""
        self._computed = logits
        for view in (reference() for reference in self._views):
            if view is None or view._viewed is None:
                continue
            with _gradients(view._has_gradient):
                view._keep(view._viewed[1](logits))

    def _pass_hidden(self) -> Tensor:
        self._head.check_inputs()
        if not self._hidden.requires_grad:
            return self._hidden
        with without_torch_function():
            logits = self.as_subclass(Tensor)
        return map_tokens(self._hidden, lambda hidden: _Through.apply(hidden, logits))  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.compute())

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_tracing():
            break_graph("deferred logits (--fused-loss)")
        if func in FACTS or (func is Tensor.register_hook and not is_from_user(args[1])):
            return super().__torch_function__(func, types, args, kwargs)
        if func in _NEED_GRADIENT:
            _check_gradient(args[_NEED_GRADIENT[func] :])
        follow = _FOLLOWED.get(func)
        if follow is not None and args and isinstance(args[0], cls) and args[0]._computed is None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and args[0]._has_gradient):
                result = follow(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(cls, cls.compute, (args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def _gradients(is_on: bool) -> Iterator[None]:
    """Set autograd's mode, whatever it was when the logits turned out to be needed."""
    with torch.inference_mode(False), torch.set_grad_enabled(is_on):
        yield


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    """The tensor, unless it has changed: torch does not check those that hooks have packed."""
    saved, version = packed
    if note_version(saved)[1] != version:
        raise RuntimeError(
            "one of the variables needed for the gradient of the logits has been modified by an "
            "inplace operation."
        )
    return saved


_NEED_GRADIENT = {Tensor.register_hook: 0, Tensor.retain_grad: 0, torch.autograd.grad: 1}
"""Functions that need the gradient of logits, mapped to the position of the first such argument."""


def _check_gradient(given: Any) -> None:
    """Refuse to compute the gradient of logits whose loss has been computed without them."""
    if any(isinstance(x, DeferredLogits) and x._is_followed for x in tree_leaves(given)):
        raise ConfigurationError(
            "The gradient of the logits was asked for, but their loss was computed without "
            "them. Set --fused-loss off."
        )


def defer(head: Head, hidden: Tensor, width: int, dtype: torch.dtype) -> DeferredLogits:
    """The outputs of ``head`` for ``hidden``, not computed yet."""
    layout = torch.empty(*hidden.shape[:-1], width, dtype=dtype, device="meta")
    return _build(head, hidden, layout, ())


def _build(head: Head, hidden: Tensor, layout: Tensor, steps: tuple[Step, ...]) -> DeferredLogits:
    # Only autograd sees the stand-in, to run hooks. The logits have a gradient even if only the
    # head is trained.
    anchor = hidden if hidden.requires_grad else hidden.new_empty(0).requires_grad_()
    if isinstance(anchor, Unpadded):
        anchor = anchor.tokens if anchor.is_lazy else settle(anchor)
    stand_in = _StandIn.apply(anchor, layout, hidden.device)  # type: ignore[no-untyped-call]
    logits: DeferredLogits = stand_in.as_subclass(DeferredLogits)
    logits._head, logits._hidden, logits._steps = head, hidden, steps
    logits._layout, logits._has_gradient = layout, torch.is_grad_enabled()
    logits._viewed, logits._views = None, []
    logits._computed, logits._is_followed = None, False
    return logits


def _compute_for_function(function: type, logits: DeferredLogits) -> Tensor:
    say_once(
        f"--fused-loss: {function.__name__}, a torch.autograd.Function, needs all logits, so they "
        "are computed as without the switch."
    )
    return logits.compute()


def _watch_torch() -> Callable[[], None]:
    watching = ExitStack()
    watching.enter_context(convert_function_arguments(DeferredLogits, _compute_for_function))
    watching.enter_context(DATA_ACCESS)
    watching.callback(watch_steps().remove)
    return watching.close


WATCHING = Change(_watch_torch)
"""Inside, we see what bypasses ``__torch_function__``: autograd functions and optimizer steps."""


class _StandIn(torch.autograd.Function):
    """A tensor with the logits' shape and place in the autograd graph, but without values."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, layout: Tensor, device: torch.device) -> Tensor:
        # One value, expanded, takes no memory.
        return torch.full((), float("nan"), dtype=layout.dtype, device=device).expand(layout.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        # ``_Through`` sends one zero, expanded. Any other gradient comes from code that bypasses
        # ``__torch_function__`` and took this for real logits.
        if any(gradient.stride()) and bool(gradient.any()):
            raise ConfigurationError(
                "The logits were used by torch.func (vmap, grad) or a compiled extension, which "
                "--fused-loss cannot follow. Pass it a copy, outputs.logits.clone(), or set "
                "--fused-loss off."
            )
        return None, None, None


class _Through(torch.autograd.Function):
    """Passes hidden states on as if they came from the logits, so that hooks on the logits run."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, logits: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, gradient.new_zeros((), dtype=ctx.dtype).expand(ctx.shape)


# ---- operations on logits that do not compute them -----------------------------------------------
#
# Each returns NotImplemented if the logits must be computed after all.


def _compute_loss(
    func: Any, logits: DeferredLogits, target: Tensor, weight: Tensor | None = None,
    size_average: Any = None, ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """``functional.cross_entropy`` chunk by chunk."""
    is_plain = weight is None and size_average is None and reduce is None
    is_labelled = not target.is_floating_point() and target.shape == logits.shape[:-1]
    if not is_plain or not is_labelled or logits.dim() != 2 or reduction not in ("mean", "sum"):
        return NotImplemented
    # A checkpoint runs a loss twice and must save the same both times, even if the logits were
    # computed in between.
    if has_saved_tensor_hooks():
        return NotImplemented
    # Widening to fp32 is not a step: the loss is computed in fp32 anyway.
    steps = () if set(logits._steps) <= {Tensor.float} else logits._steps
    recipe = Recipe(ignore_index=ignore_index, label_smoothing=label_smoothing, steps=steps)
    total = logits._head.compute_loss(logits.get_hidden(), target, recipe)
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _reshape(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """``view``, ``reshape`` and ``flatten``, if they keep the last dimension."""
    if not all(isinstance(size, (int, tuple, list)) for size in (*args, *kwargs.values())):
        return NotImplemented  # a dtype
    layout = func(logits._layout, *args, **kwargs)
    if not layout.dim() or layout.shape[-1] != logits.shape[-1]:
        return NotImplemented
    # Not ``func``: hidden states need not have the logits' strides.
    hidden = logits.get_hidden().reshape(*layout.shape[:-1], logits._hidden.shape[-1])
    return _move(logits, hidden, lambda x: func(x, *args, **kwargs))


def _index(func: Any, logits: DeferredLogits, index: Any) -> Any:
    """Slices that keep the last dimension, such as ``logits[:, :-1]``."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return NotImplemented
    slices = [part for part in parts if part is not Ellipsis]
    touches_words = len(slices) == logits.dim() or Ellipsis in parts[:-1]
    if touches_words and slices[-1:] != [slice(None)]:
        return NotImplemented
    return _move(logits, logits.get_hidden()[index], lambda x: x[index])


def _make_contiguous(func: Any, logits: DeferredLogits, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    if logits._layout.is_contiguous():
        return logits
    return _move(logits, logits.get_hidden().contiguous(), Tensor.contiguous)


def _cast(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """``float`` and ``to``: note the cast as a step."""
    # Try the call on one element, to see which dtype and device it asks for.
    element = torch.empty((), dtype=logits.dtype, device=logits.device)
    kind = func(element, *args, **kwargs)
    if kind is element:
        return logits
    if kind.device != logits.device or kind.dtype not in DTYPES or kind.dtype == logits.dtype:
        return NotImplemented
    is_widened = kind.dtype == torch.float32
    step = Tensor.float if is_widened else lambda x: x.to(kind.dtype)
    return _change(logits, step, kind.dtype)


def _apply(func: Any, logits: DeferredLogits, *factor: Any, **kwargs: Any) -> Any:
    """Products with a number, and ``tanh``."""
    if not all(isinstance(number, (int, float)) for number in factor) or kwargs:
        return NotImplemented
    return _change(logits, lambda x: func(x, *factor))


def _move(logits: DeferredLogits, hidden: Tensor, look: Step) -> DeferredLogits:
    """Logits in another shape, or some of their rows: a view or a copy, as torch decides."""
    layout = look(logits._layout)
    moved = _build(logits._head, hidden, layout, logits._steps)
    if get_storage_key(layout) == get_storage_key(logits._layout):
        moved._viewed = logits, look
        logits._views.append(weakref.ref(moved))
    return moved


def _change(logits: DeferredLogits, step: Step, dtype: torch.dtype | None = None) -> Tensor:
    """Logits after one more step, in their own memory."""
    layout = torch.empty_like(logits._layout, dtype=dtype)
    return _build(logits._head, logits.get_hidden(), layout, (*logits._steps, step))


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _compute_loss,
    Tensor.view: _reshape, Tensor.reshape: _reshape,
    Tensor.flatten: _reshape, torch.flatten: _reshape,
    Tensor.__getitem__: _index,
    Tensor.contiguous: _make_contiguous,
    Tensor.float: _cast, Tensor.to: _cast,
    Tensor.mul: _apply, Tensor.__mul__: _apply, Tensor.__rmul__: _apply,
    Tensor.div: _apply, Tensor.__truediv__: _apply,
    torch.mul: _apply, torch.div: _apply,
    Tensor.tanh: _apply, torch.tanh: _apply,
}  # fmt: skip
