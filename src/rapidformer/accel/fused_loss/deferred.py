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

from rapidformer.accel.fused_loss.chunked import Step
from rapidformer.accel.fused_loss.head import DATA_ACCESS, Head, watch_steps
from rapidformer.accel.later import LateTensor, StandIn, build_nothing, note_version, unpack
from rapidformer.accel.unpad.on_demand import Unpadded, map_tokens, settle
from rapidformer.compat.patches import Change
from rapidformer.compat.torch_dispatch import (
    convert_function_arguments,
    tree_leaves,
    without_torch_dispatch,
    without_torch_function,
)
from rapidformer.errors import ConfigurationError
from rapidformer.log import say_once
from rapidformer.models.watched import is_from_user

FOLLOWED: dict[Any, Callable[..., Any]] = {}
"""Operations that do not compute the logits; each returns NotImplemented if it must after all."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of logits that can be deferred. Losses are computed in fp32."""


_NOT_FOLLOWED = (
    "The logits were used by torch.func (vmap, grad) or a compiled extension, which --fused-loss "
    "cannot follow. Pass it a copy, outputs.logits.clone(), or set --fused-loss off."
)


class DeferredLogits(LateTensor):
    """The outputs of a head that has not been applied yet."""

    meaning = "deferred logits (--fused-loss)"
    head: Head
    _hidden: Tensor
    """Same shape as the logits, except for the last dimension."""
    steps: tuple[Step, ...]
    strided: Tensor
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

    @property
    def is_computed(self) -> bool:
        return self._computed is not None

    def add_view(self, view: DeferredLogits, look: Step) -> None:
        """Note that other logits are a view of these, and how."""
        view._viewed = self, look
        self._views.append(weakref.ref(view))

    def compute(self) -> Tensor:
        """The logits as a plain tensor, with their gradient."""
        if self._computed is None and self._viewed is not None:
            self._viewed[0].compute()
        elif self._computed is None:
            # With a gradient even under no_grad: the result is kept, and a loss may use it later.
            # Saved tensors bypass hooks for the same reason: a checkpointed loss that computes the
            # logits finds them computed when it runs again.
            with _gradients(self._has_gradient), saved_tensors_hooks(note_version, unpack):
                logits = self.head.compute(self._pass_hidden())
                for step in self.steps:
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

    def map_hidden(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        """The logits of changed hidden states; of computed logits, the same change."""
        if self._computed is not None:
            return change(self._computed)
        return build(self.head, change(self.get_hidden()), self.strided, self.steps)

    def _pass_hidden(self) -> Tensor:
        self.head.check_inputs()
        if not self._hidden.requires_grad:
            return self._hidden
        with without_torch_function(), without_torch_dispatch():
            logits = self.as_subclass(Tensor)
        return map_tokens(self._hidden, lambda hidden: _Through.apply(hidden, logits))

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.compute())

    @classmethod
    def follow(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record what is done to the logits, or compute their loss; otherwise NotImplemented."""
        if func is Tensor.register_hook and not is_from_user(args[1]):
            with without_torch_function():
                return func(*args)
        if func in _NEED_GRADIENT:
            _check_gradient(args[_NEED_GRADIENT[func] :])
        follow = FOLLOWED.get(func)
        if follow is None or not args or not isinstance(args[0], cls) or args[0].is_computed:
            return NotImplemented
        with torch.set_grad_enabled(torch.is_grad_enabled() and args[0]._has_gradient):
            return follow(func, *args, **kwargs)


@contextmanager
def _gradients(is_on: bool) -> Iterator[None]:
    """Set autograd's mode, whatever it was when the logits turned out to be needed."""
    with torch.inference_mode(False), torch.set_grad_enabled(is_on):
        yield


_NEED_GRADIENT = {Tensor.register_hook: 0, Tensor.retain_grad: 0, torch.autograd.grad: 1}
"""Functions that need the gradient of logits, mapped to the position of the first such argument."""


def _check_gradient(given: Any) -> None:
    """Refuse to compute the gradient of logits whose loss has been computed without them."""
    if any(isinstance(x, DeferredLogits) and x._is_followed for x in tree_leaves(given)):
        raise ConfigurationError(
            "The gradient of the logits was asked for, but their loss was computed without "
            "them. Set --fused-loss off."
        )


def build(head: Head, hidden: Tensor, layout: Tensor, steps: tuple[Step, ...]) -> DeferredLogits:
    # Only autograd sees the stand-in, to run hooks. The logits have a gradient even if only the
    # head is trained.
    anchor = hidden if hidden.requires_grad else hidden.new_empty(0).requires_grad_()
    if isinstance(anchor, Unpadded):
        anchor = anchor.tokens if anchor.is_lazy else settle(anchor)
    stand_in = StandIn.apply(anchor, layout.shape, layout.dtype, _NOT_FOLLOWED)
    logits: DeferredLogits = stand_in.as_subclass(DeferredLogits)
    logits.head, logits._hidden, logits.steps = head, hidden, steps
    logits.strided, logits._has_gradient = layout, torch.is_grad_enabled()
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


class _Through(torch.autograd.Function):
    """Passes hidden states on as if they came from the logits, so that hooks on the logits run."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, logits: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, build_nothing(gradient, ctx.shape, ctx.dtype)
