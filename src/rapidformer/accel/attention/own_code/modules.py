"""Row ``own attention code``: which modules compute attention themselves, and what they get.

About a hundred attention classes of transformers do not use its attention functions: they compute
the scores of all pairs of tokens, mask them, and so on, step by step. Inside such modules, the
product of queries and keys is noted instead of computed (``scores.py``). If code does anything with
it that fused attention cannot, the scores are computed after all.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.attention.own_code import fused, rules, scores
from rapidformer.accel.attention.own_code.form import Form
from rapidformer.accel.later import note_version
from rapidformer.accel.unpad.dropout import BITS
from rapidformer.compat.torch_compile import is_tracing, untraced
from rapidformer.compat.torch_dispatch import is_transformed
from rapidformer.compat.transformers_models import has_own_attention_code
from rapidformer.overlay import extend, get_own_class, list_layers

_LAYER = "scores"
_DEVICES = ["cuda"]
"""Tests add the CPU. There, torch's fused attention has no dropout."""


def apply(assembly: Assembly) -> str | None:
    """Defer the scores of all attention modules with code of their own."""
    count = apply_own_code(assembly.model)
    if not count:
        return None
    scores.WATCHING.keep(assembly.applied)
    return f"{count} attention layers"


def apply_own_code(model: nn.Module) -> int:
    """The same for any model; returns how many modules there are."""
    found = [module for module in model.modules() if _suits(module)]
    for module in found:
        extend(module, _LAYER, _build_attention, is_shared=True)
    if found and _LAYER not in list_layers(model):
        extend(model, _LAYER, _build_model)
    return len(found)


def is_applied(model: nn.Module) -> bool:
    """Whether a model's attention leaves its scores to us."""
    return any(_LAYER in list_layers(module) for module in model.modules())


def has_learned_bias(model: nn.Module) -> bool:
    """The same, for attention with learned biases of positions (MPNet, XLNet, Swin)."""
    names = [name for name, _ in model.named_parameters()]
    is_learned = any(part in name for name in names for part in ("relative", "r_r_bias"))
    return is_learned and is_applied(model)


def _suits(module: nn.Module) -> bool:
    is_replaced = {"positions", _LAYER} & {*list_layers(module)}
    return has_own_attention_code(get_own_class(module)) and not is_replaced


def _build_attention(cls: Any) -> dict[str, Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _can_see_all():
            return cls.forward(self, *args, **kwargs)
        with _Deferring(self) as deferring:
            output = cls.forward(self, *args, **kwargs)
        # Weights that attention has used are usually dropped.
        return scores.compute_all(output, but_weights=deferring.has_deferred)

    return {"forward": forward}


def _build_model(cls: Any) -> dict[str, Any]:
    """The whole model returns plain tensors: weights are there because somebody asked for them."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = cls.forward(self, *args, **kwargs)
        return output if torch.compiler.is_compiling() else scores.compute_all(output)

    return {"forward": forward}


def _can_see_all() -> bool:
    """Whether code that runs now is not traced, and calls torch's own functions."""
    is_plain = functional.softmax is scores.SOFTMAX and (
        functional.dropout is scores.DROPOUT or BITS.is_made
    )
    return is_plain and not is_tracing() and not is_transformed()


class _Deferring(TorchFunctionMode):
    """Inside, products of queries and keys are deferred."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self.has_deferred = False

    @untraced
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        start = _PRODUCTS.get(func)
        if start is not None:
            deferred = start(self, func, args, kwargs)
            if deferred is not None:
                return deferred
        result = func(*args, **kwargs)
        place = _CREATORS.get(func)
        if place is not None and len(args) > place:
            rules.note_number(result, args[place])
        return result

    def multiply(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """``matmul``, ``bmm`` and ``@``."""
        return None if kwargs else self._defer(func, args, kwargs, *args)

    def add_product(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """``baddbmm``: beta * term + alpha * left @ right."""
        named = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
        term, left, right = (named.pop(name, None) for name in ("input", "batch1", "batch2"))
        beta, alpha = named.pop("beta", 1.0), named.pop("alpha", 1.0)
        is_known = not named and type(term) is Tensor and term.is_floating_point()
        if not is_known or not all(isinstance(each, (int, float)) for each in (beta, alpha)):
            return None
        return self._defer(func, args, kwargs, left, right, term=term, beta=beta, alpha=alpha)

    def sum_products(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """``einsum``."""
        equation, *operands = args
        operands = [*operands[0]] if len(operands) == 1 else operands
        if len(operands) != 2 or {type(each) for each in (equation, *operands)} != {str, Tensor}:
            return None
        names = rules.split_equation(equation, *(each.dim() for each in operands))
        if names is None or rules.order(names)[2] != names[2]:
            return None
        wanted = rules.order(names)
        return self._defer(func, args, kwargs, *map(rules.permute, operands, names[:2], wanted[:2]))

    def _defer(
        self, func: Any, args: Any, kwargs: dict[str, Any], left: Any, right: Any,
        *, term: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0,
    ) -> Any:  # fmt: skip
        if not _can_defer(left, right):
            return None
        dtype = rules.get_product_dtype(left, left.device)
        lead, shape = tuple(left.shape[:-2]), (*left.shape[:-1], right.shape[-1])
        noted = note_version(left), note_version(right)
        parts = left.to(dtype), right.to(dtype)
        form: Form | None = Form(self._module, *parts, lead, scale=alpha, noted=noted)
        assert form is not None
        if term is not None and beta != 0:
            if dtype == torch.float16:
                return None
            # Not rounded as autocast would: ALiBi's numbers are large.
            form = form.add(term * beta if beta != 1 else term, shape)
        if form is None:
            return None
        self.has_deferred = True
        replay = scores.replay_later(func, args, kwargs, left.device)
        return scores.build(form, shape, dtype, replay)


def _can_defer(left: Any, right: Any) -> bool:
    """Whether these may be queries and keys, for which fused attention pays."""
    return (
        type(left) is Tensor
        and type(right) is Tensor
        and left.dim() == right.dim() >= 3
        and left.device == right.device
        and left.device.type in _DEVICES
        and left.is_floating_point()
        and (left.dtype == right.dtype or torch.is_autocast_enabled(left.device.type))
        and left.shape[:-2] == right.shape[:-2]
        and left.shape[-1] == right.shape[-2]
        and left.shape[-2] > 1
        and fused.fits(left.shape[-1])
    )


_PRODUCTS: dict[Any, Any] = {
    **dict.fromkeys((torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm), _Deferring.multiply),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), _Deferring.add_product),
    torch.einsum: _Deferring.sum_products,
}
_CREATORS = {torch.tensor: 0, torch.full: 1}
"""Functions that make a tensor from a number, and where that stands."""
