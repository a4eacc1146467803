"""What a block does while one stage of the model runs: pass on, take over, run, or end the call.

The model's own forward runs on every stage, with the real batch, for masks and positions. The block
after the stage's last one ends the call with an exception that passes through the user's code, so
nothing after the call of the model runs there, except on the last stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.pipeline.discovery import form_output, iterate_floats
from rapidformer.accel.pipeline.layout import FLAG, Stage
from rapidformer.accel.split.absent import build_placeholder
from rapidformer.accel.tensor.styles import get_first, replace_first
from rapidformer.accel.unpad.on_demand import put_zeros
from rapidformer.compat.torch_dispatch import tree_map_only
from rapidformer.errors import ModelError, RapidformerError
from rapidformer.overlay import extend, get_fact, put_fact

_running: list[StageContext] = []
"""Those whose models run: one, unless a forward step calls a second model."""


_MORE = (
    "block {} returns more than its hidden state with a gradient (a mixture of experts' loss?), "
    "and the model uses it, which --pipeline-model-parallel-size cannot pass between stages. Use "
    "--zero-3-memory-optimization instead."
)


class StageEnd(BaseException):
    """Ends a stage's forward pass. Not an ``Exception``, so user code does not catch it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(eq=False, kw_only=True)
class StageContext:
    """What a model's blocks know about the current pass."""

    dtype: torch.dtype
    """The dtype of hidden states between stages."""
    tuple_size: int
    """How many values the model expects of its blocks; 0: the hidden state itself."""
    instead: str
    """What to use for a loss that needs more than one stage."""
    splits_backward: bool = False
    """Whether the schedule computes gradients of weights apart from those of inputs."""
    stage: Stage | None = None
    """The running stage; None between passes."""
    received: Tensor | None = None
    is_probing: bool = False
    """Whether only the shape of the stage's input is needed."""
    on_entry: Callable[[], None] | None = None
    has_called: bool = False
    is_in_model: bool = False
    """Whether the model's own code runs, not the user's forward step around it."""
    is_in_module: bool = False
    """Whether user code calls a module outside the blocks by itself, such as the embedding."""
    given: tuple[Tensor, ...] = ()
    """Arguments of the model's call that need a gradient."""
    ended_with: Tensor | None = None

    @contextmanager
    def at(
        self,
        stage: Stage,
        received: Tensor | None = None,
        *,
        is_probing: bool = False,
        on_entry: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Make the model this stage of itself for one pass."""
        self.stage, self.received, self.is_probing = stage, received, is_probing
        self.on_entry, self.has_called, self.ended_with = on_entry, False, None
        _running.append(self)
        try:
            yield
        finally:
            _running.remove(self)
            self.stage = self.received = self.on_entry = self.ended_with = None
            self.given = ()

    @property
    def is_at_loss(self) -> bool:
        """Whether user code runs whose result counts: other stages' forward steps run in part."""
        return self.stage is not None and self.stage.is_last and not self.is_in_model

    def pass_block(
        self, index: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What block ``index`` does in the current pass."""
        stage = self.stage
        if stage is None:
            raise ModelError(
                "a part of a model was called on its own, but the model is cut into stages "
                "(--pipeline-model-parallel-size): call the whole model."
            )
        if index < stage.start:
            hidden = get_first(args, kwargs)
            return form_output(hidden, self.tuple_size)
        if index == stage.end:
            # Shapes between stages do not depend on who removes padding.
            hidden = put_zeros(get_first(args, kwargs)).to(self.dtype).contiguous()
            # Not a view: torch detaches a stage's output in place if backward passes are split. Nor
            # the block's own output: FSDP's hooks on both would gather in another order than on a
            # replica without padding.
            raise StageEnd(hidden.clone())
        if index == stage.start and self.is_probing:
            raise StageEnd(get_first(args, kwargs))
        if index == stage.start and not stage.is_first:
            entered = self._enter(get_first(args, kwargs).shape, stage)
            args, kwargs = replace_first(args, kwargs, lambda _: entered)
        output = run(*args, **kwargs)
        if isinstance(output, tuple) and any(t.requires_grad for t in iterate_floats(output[1:])):
            # Most models ignore it (attention's probabilities); a loss of experts is not ignored.
            why = functools.partial(str, _MORE.format(index))
            output = (output[0], *tree_map_only(Tensor, lambda t: _hide(t, why), output[1:]))
        return output

    def _enter(self, expected: torch.Size, stage: Stage) -> Tensor:
        """The hidden state that was received, for the stage's first block."""
        received = self.received
        assert received is not None
        if received.shape != expected:
            raise RapidformerError(
                f"a stage received a hidden state of shape {list(received.shape)} but expected "
                f"{list(expected)}: the forward step must do the same on every rank."
            )
        if self.on_entry is not None:
            self.on_entry()
        # Only there does user code continue after the call.
        if self.given and stage.is_last:
            return _Received.apply(received, self, *self.given)
        # Not the tensor itself: autocast would sum a leaf's gradients in 16 bits.
        return received.view_as(received)


def _hide(value: Tensor, why: Callable[[], str]) -> Tensor:
    return build_placeholder(value, value.device, why) if value.requires_grad else value


class _Received(torch.autograd.Function):
    """A received hidden state, which depends on the call's arguments through earlier stages.

    Without this dependency ``torch.autograd.grad(..., allow_unused=True)`` with respect to such an
    argument would find none, and return None.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor, context: StageContext, *arguments: Tensor) -> Tensor:
        ctx.context, ctx.shapes = context, [argument.shape for argument in arguments]
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        refuse_gradient(ctx.context)
        # Zeros: if torch splits the backward pass, it wants a gradient for all that it can reach.
        is_split = ctx.context.splits_backward
        nothing = [gradient.new_zeros(shape) if is_split else None for shape in ctx.shapes]
        return gradient, None, *nothing


def refuse_second_model() -> None:
    """Raise if a model is to be relayed through its stages while another one's schedule runs."""
    if _running:
        raise RapidformerError(
            f"{FLAG}: the forward step calls a second model that is cut into stages, too "
            "(compose_for_evaluation), but the ranks of its other stages are busy with other "
            "micro-batches. Keep it whole, as teacher.to(engine.device).eval(), without "
            "compose_for_evaluation; if the step calls it after the model, only the last stage "
            "runs it."
        )


def refuse_gradient(context: StageContext) -> None:
    """Raise if the forward step takes a gradient of which other stages have a part."""
    if context.is_at_loss:
        raise RapidformerError(describe_gradient_problem(context))


def describe_gradient_problem(context: StageContext) -> str:
    """What is wrong with a gradient of which other stages have a part."""
    return (
        f"{FLAG}: the forward step takes a gradient (torch.autograd.grad) with respect to what "
        "another stage has computed, such as an embedding's output. Stages exchange hidden states "
        f"only: use {context.instead}."
    )


@dataclass(frozen=True, eq=False)
class Gate:
    """What a block needs to know about the pipeline."""

    context: StageContext
    index: int


def apply_gates(blocks: list[nn.Module], context: StageContext) -> None:
    """Make every block ask the context first, in place; outside all other overlays."""
    for index, block in enumerate(blocks):
        put_fact(block, Gate(context, index))
        extend(block, "stages", _build_gate, is_shared=True)


def _build_gate(cls: type[nn.Module]) -> dict[str, Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        gate, run = get_fact(self, Gate), functools.partial(cls.__call__, self)
        return gate.context.pass_block(gate.index, run, args, kwargs)

    return {"__call__": call}
