"""Which attention kernels a model uses: inside its own calls, and nowhere else.

torch keeps the order of its kernels for the whole process, and transformers its table of attention
functions. So both are set when a composed model is entered and put back when it is left. A block
that is recomputed in the backward pass is not inside a call of its model; it must get the same
kernel again, or its dropout would differ, so blocks enter by themselves.

cuDNN prepares a plan for every new combination of sizes, which takes longer than a step of a small
model. Rows of a fixed length are nearly always multiples of 64, and rows padded to the longest of a
batch rarely are. So for all other lengths, cuDNN comes after torch's own fused kernels: by a call's
sizes alone, so that a resumed run and a recomputed block choose the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend

from rapidformer.accel.attention.learned_bias import interface
from rapidformer.accel.attention.learned_bias.operator import attend as attend_with_bias
from rapidformer.compat.patches import Entry, Patch
from rapidformer.compat.transformers_models import get_attention_table
from rapidformer.overlay import extend, find_fact, put_fact


@dataclass(frozen=True)
class KernelChoice:
    """What was chosen for a model; a fact on each of its modules."""

    order: tuple[SDPBackend, ...]
    """The kernels that torch tries, first one first."""
    avoids_plans: bool = False
    """Whether cuDNN is kept out of attention whose lengths differ from batch to batch."""
    has_bias_kernel: bool = False
    """Whether our kernel computes attention with a learned bias."""


_CURRENT: ContextVar[KernelChoice | None] = ContextVar("kernels", default=None)
_INSIDE: AbstractContextManager[None] = nullcontext()
_CUDNN_LATE = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)  # fmt: skip
MULTIPLE = 64
"""Lengths that are multiples of this count as fixed."""


def apply_choice(model: nn.Module, blocks: Iterable[nn.Module], choice: KernelChoice) -> None:
    """Let a model and its blocks use these kernels when they are called."""
    for module in model.modules():
        put_fact(module, choice)
    for module in {model: None, **dict.fromkeys(blocks)}:
        extend(module, "kernels", _build_scoped, is_shared=True)


def _build_scoped(cls: Any) -> dict[str, Any]:
    # ``forward``, which runs again wherever a block is recomputed, by whomever.
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # entered outside the compiled code
            return cls.forward(self, *args, **kwargs)
        with use_kernels(self):
            return cls.forward(self, *args, **kwargs)

    return {"forward": forward}


def use_kernels(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, attention uses the kernels chosen for the module's model."""
    choice = find_fact(module, KernelChoice)
    return _INSIDE if choice is None or choice == _CURRENT.get() else _enter(choice)


@contextmanager
def _enter(choice: KernelChoice) -> Iterator[None]:
    before = _CURRENT.set(choice)
    try:
        with ExitStack() as stack:
            stack.enter_context(_use_order(choice.order))
            if choice.avoids_plans or choice.has_bias_kernel:
                stack.enter_context(ATTENTION)
            yield
    finally:
        _CURRENT.reset(before)


def choose_for_all_sizes(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, code compiled for all sizes keeps cuDNN out, if the module's model does."""
    choice = find_fact(module, KernelChoice)
    return _INSIDE if choice is None or not choice.avoids_plans else _use_order(_CUDNN_LATE)


def _use_order(order: Iterable[SDPBackend]) -> AbstractContextManager[None]:
    return attention.sdpa_kernel(list(order), set_priority=True)


def _list_entries() -> Iterator[Entry]:
    yield Entry(get_attention_table(), "sdpa", _build_attention)


def attend_fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *,
    dropout: float,
    scale: float,
) -> Tensor:
    """Attention of a module with code of its own, by what was chosen for its model."""
    choice = find_fact(module, KernelChoice) or KernelChoice(())
    if choice.has_bias_kernel and bias is not None and interface.suits(query, key, value, bias):
        return attend_with_bias(
            query, key, value, bias.contiguous(), dropout=dropout, scale=scale, is_causal=False
        )
    is_varied = query.shape[2] % MULTIPLE or key.shape[2] % MULTIPLE
    order = _use_order(_CUDNN_LATE) if choice.avoids_plans and is_varied else nullcontext()
    with order:
        return functional.scaled_dot_product_attention(
            query, key, value, bias, dropout_p=dropout, scale=scale
        )


def _build_attention(plain: Any) -> Any:
    """transformers' attention by torch, as chosen for the model that a module belongs to."""

    def by_length(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
        # A compiled block chooses once for all sizes, and must not look at them.
        if torch.compiler.is_compiling() or not (
            query.shape[2] % MULTIPLE or key.shape[2] % MULTIPLE
        ):
            return plain(module, query, key, *args, **options)
        with _use_order(_CUDNN_LATE):
            return plain(module, query, key, *args, **options)

    with_bias, with_both = map(interface.build_attention, (plain, by_length))

    @functools.wraps(plain)
    def attend(module: nn.Module, *args: Any, **options: Any) -> Any:
        # By the module, not by what was entered: another thread may run a plain model.
        choice = find_fact(module, KernelChoice)
        if choice is None:
            return plain(module, *args, **options)
        if choice.has_bias_kernel:
            run = with_both if choice.avoids_plans else with_bias
        else:
            run = by_length if choice.avoids_plans else plain
        return run(module, *args, **options)

    return attend


ATTENTION = Patch(_list_entries)
"""Inside, transformers' ``sdpa`` attention looks at what was chosen for a model."""
