"""What models' code does to scores and weights without their values being needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.accel.attention.own_code import fused
from rapidformer.accel.attention.own_code.form import ABSORBING, Form
from rapidformer.accel.attention.own_code.scores import (
    FOLLOWED,
    IN_PLACE,
    ChangedInPlaceError,
    Node,
    Result,
)
from rapidformer.compat.torch_tensors import count_changes
from rapidformer.errors import RapidformerError
from rapidformer.overlay import get_own_class

_PLAIN = (Tensor, nn.Parameter)
_VALUES = "rapidformer_value"
_OTHERS = "ΑΒΓΔΕ"
"""Names for dimensions that ``einsum`` was given as three dots."""


def note_number(tensor: Any, number: Any) -> None:
    """A tensor that was created from a number, which can be known without asking the device."""
    if type(tensor) is Tensor and tensor.dim() == 0 and isinstance(number, (int, float)):
        setattr(tensor, _VALUES, (float(number), count_changes(tensor)))


def get_product_dtype(left: Tensor | Node, device: torch.device) -> torch.dtype:
    """Of what a matrix product returns."""
    if torch.is_autocast_enabled(device.type) and left.dtype != torch.float64:
        return torch.get_autocast_dtype(device.type)
    return left.dtype


def split_equation(equation: str, *dims: int) -> tuple[str, str, str] | None:
    """Two operands of ``einsum`` and its result, if that is a batched matrix product.

    ``dims`` are the operands' numbers of dimensions.
    """
    left, comma, rest = equation.replace(" ", "").partition(",")
    right, arrow, result = rest.partition("->")
    others = _OTHERS[: max(dims) - len(max(left, right, key=len)) + len("...")]
    left, right, result = (part.replace("...", others) for part in (left, right, result))
    names = left + right + result
    if not (comma and arrow and names.isalpha() and (len(left), len(right)) == dims):
        return None
    is_unique = all(len(set(part)) == len(part) for part in (left, right, result))
    contracted = set(left) & set(right) - set(result)
    own = [set(part) & set(result) - set(other) for part, other in ((left, right), (right, left))]
    is_product = len(contracted) == len(own[0]) == len(own[1]) == 1
    is_whole = len(left) == len(right) == len(result) >= 3
    return (left, right, result) if is_unique and is_product and is_whole else None


def order(equation: tuple[str, str, str]) -> tuple[str, str, str]:
    """The same with dimensions ordered: [*, m, k], [*, k, n] -> [*, m, n]."""
    left, right, result = equation
    (contracted,) = set(left) & set(right) - set(result)
    (rows,), (columns,) = set(left) - set(right), set(right) - set(left)
    lead = "".join(name for name in result if name not in (rows, columns))
    return lead + rows + contracted, lead + contracted + columns, lead + rows + columns


def permute(tensor: Tensor, names: str, wanted: str) -> Tensor:
    """A tensor with its named dimensions in another order."""
    return tensor if names == wanted else tensor.permute([names.index(name) for name in wanted])


def _measure(func: Callable[..., Tensor], node: Node, *args: Any, **kwargs: Any) -> Tensor:
    """What an operation returns, without values."""
    found = [
        torch.empty_strided(
            each.shape, each.stride(), dtype=each.dtype, device="meta"
        ) if isinstance(each, Tensor) else each
        for each in (torch.empty(node.shape, dtype=node.dtype, device="meta"), *args)
    ]  # fmt: skip
    with torch.no_grad():
        return func(*found, **kwargs)


def _derive(node: Node, form: Form | None, measured: Tensor, *, is_view: bool = False) -> Result:
    # In fp16, the lowest number does not absorb a score wherever that is computed in fp32.
    is_rounded = not form or (measured.dtype == torch.float16 and not form.is_weights)
    if form is None or is_rounded or not measured.is_floating_point():
        return NotImplemented
    if is_view:
        node.is_shared = True
    base = node if is_view else None
    return Node(form, tuple(measured.shape), measured.dtype, None, base=base, is_shared=is_view)


def _read_number(value: Any) -> float | None:
    """A number, also of a tensor, if the device need not be asked."""
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.numel() != 1 or value.requires_grad:
            return None
        number, version = getattr(value, _VALUES, (None, None))
        if number is not None:
            return float(number) if version == count_changes(value) else None
        return float(value) if value.device.type == "cpu" else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def _is_operand(value: Any) -> bool:
    return type(value) in _PLAIN and value.is_floating_point()


def _multiply(func: Any, node: Any, factor: Any = None, **kwargs: Any) -> Result:
    if not isinstance(node, Node):
        node, factor = factor, node
        if func in _QUOTIENTS:
            return NotImplemented
    if kwargs or node.form.is_weights or not isinstance(node, Node):
        return NotImplemented
    divides, number = func in _QUOTIENTS, _read_number(factor)
    if number is not None:
        if number == 0 or number != number or abs(number) == float("inf"):
            return NotImplemented
        form: Form | None = node.form.multiply(1 / number if divides else number)
    elif _is_operand(factor):
        form = node.form.multiply_rows(factor, node.shape, divides=divides)
    else:
        return NotImplemented
    return _derive(node, form, _measure(func, node, factor))


def _add(func: Any, node: Any, term: Any = None, **kwargs: Any) -> Result:
    if not isinstance(node, Node):
        node, term = term, node
        if func in _DIFFERENCES:
            return NotImplemented
    if not kwargs and type(term) in (int, float) and term == 0:
        return _derive(node, node.form, _measure(func, node, term))
    if kwargs or node.form.is_weights or not _is_operand(term) or term.dim() == 0:
        return NotImplemented
    if func in _DIFFERENCES:
        term = -term
    return _derive(node, node.form.add(term, node.shape), _measure(func, node, term))


def _fill(func: Any, node: Any, mask: Any = None, value: Any = None) -> Result:
    number = _read_number(value)
    if not isinstance(node, Node) or node.form.is_weights or number is None:
        return NotImplemented
    if type(mask) is not Tensor or mask.dtype != torch.bool:
        return NotImplemented
    return _derive(
        node, node.form.fill(mask, number, node.shape), _measure(func, node, mask, value)
    )


def _choose(func: Any, *args: Any, **_: Any) -> Result:
    if len(args) != 3:
        return NotImplemented
    if func is Tensor.where and isinstance(args[0], Node):
        args = args[1], args[0], args[2]
    condition, first, second = args
    if type(condition) is not Tensor or condition.dtype != torch.bool:
        return NotImplemented
    node, other = (first, second) if isinstance(first, Node) else (second, first)
    number = _read_number(other)
    if number is None or not isinstance(node, Node) or node.form.is_weights:
        return NotImplemented
    form = node.form.fill(~condition if node is first else condition, number, node.shape)
    return _derive(node, form, _measure(_keep_where, node, condition, other))


def _keep_where(scores: Tensor, condition: Tensor, other: Any) -> Tensor:
    """``where`` with the scores first, as ``_measure`` passes them."""
    return torch.where(condition, scores, other)


def _limit(func: Any, node: Any, other: Any = None, *_: Any, **__: Any) -> Result:
    """At least the lowest number: that of any score is larger, but minus infinity is not."""
    number = _read_number(other)
    if not isinstance(node, Node) or node.form.is_weights or not isinstance(other, Tensor):
        return NotImplemented
    if number is None or not number < ABSORBING:
        return NotImplemented
    form = node.form
    bias = None if form.bias is None else form.bias.clamp(min=number)
    return _derive(node, replace(form, bias=bias), _measure(func, node, other))


def _view(func: Any, node: Any, *args: Any, **kwargs: Any) -> Result:
    if not isinstance(node, Node):
        return NotImplemented
    measured = _measure(func, node, *args, **kwargs)
    shape = tuple(measured.shape)
    form = node.form.view(shape, node.shape) if len(shape) >= 3 else None
    return _derive(node, form, measured, is_view=True)


def _same(func: Any, node: Any, *args: Any, **kwargs: Any) -> Result:
    return node if isinstance(node, Node) else NotImplemented


def _cast(func: Any, node: Any, *args: Any, **kwargs: Any) -> Result:
    wanted = kwargs.get("dtype", args[0] if args else None)
    is_known = isinstance(node, Node) and len(args) <= 1 and not {*kwargs} - {"dtype"}
    if isinstance(wanted, Tensor) and is_known and wanted.device == node.form.query.device:
        wanted = wanted.dtype
    if func in _CASTS:
        wanted = _CASTS[func]
    if not is_known or not isinstance(wanted, torch.dtype):
        return NotImplemented
    if wanted == node.dtype:
        return node
    return _derive(node, node.form, torch.empty(node.shape, dtype=wanted, device="meta"))


def _normalise(
    func: Any, node: Any, dim: Any = None, dtype: Any = None, _stacklevel: int = 3, **kwargs: Any
) -> Result:
    is_last = isinstance(node, Node) and dim in (-1, len(node.shape) - 1)
    if not is_last or kwargs or node.form.is_weights or isinstance(dtype, int):
        return NotImplemented
    if dtype is None:
        is_wide = torch.is_autocast_enabled(node.form.query.device.type)
        dtype = torch.promote_types(node.dtype, torch.float32) if is_wide else node.dtype
    form = replace(node.form, is_weights=True)
    return _derive(node, form, torch.empty(node.shape, dtype=dtype, device="meta"))


def _drop(
    func: Any, node: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Result:
    if not isinstance(node, Node) or not node.form.is_weights:
        return NotImplemented
    if not training or p == 0:
        return node
    if inplace or not 0 < p < 1 or node.form.dropout:
        return NotImplemented
    form = replace(node.form, dropout=float(p))
    return _derive(node, form, torch.empty(node.shape, dtype=node.dtype, device="meta"))


def _attend(func: Any, node: Any, value: Any = None) -> Result:
    if not isinstance(node, Node) or not node.form.is_weights or not _is_operand(value):
        return NotImplemented
    form, device = node.form, value.device
    dtype = get_product_dtype(node, device)
    is_match = (
        value.shape[:-1] == (*node.shape[:-2], node.shape[-1]) and device == form.query.device
    )
    is_typed = get_product_dtype(value, device) == dtype and dtype.is_floating_point
    if not is_match or not is_typed or not fused.fits(value.shape[-1]):
        return NotImplemented
    if dtype == torch.float16 and form.bias is not None and form.bias.dtype != dtype:
        return NotImplemented  # fp16 has no number that absorbs a score
    if not form.is_current:
        raise ChangedInPlaceError
    if form.dropout and node.is_used:
        raise RapidformerError(
            f"{get_own_class(form.module).__name__} uses attention weights with dropout twice, for "
            "which fused attention would draw twice. Use --without own-attention-code."
        )
    node.is_used = True
    attended = fused.attend(form, value.reshape(*form.lead, *value.shape[-2:]), dtype)
    return attended.reshape(*node.shape[:-1], value.shape[-1])


def _attend_by_name(func: Any, equation: Any, *operands: Any) -> Result:
    if len(operands) == 1:
        operands = tuple(operands[0])
    if len(operands) != 2:
        return NotImplemented
    node, value = operands
    if not isinstance(node, Node) or not _is_operand(value):
        return NotImplemented
    names = split_equation(equation, len(node.shape), value.dim())
    left, right, result = ("", "", "") if names is None else order(names)
    if names is None or names[0] != left:
        return NotImplemented
    attended = _attend(func, node, permute(value, names[1], right))
    return attended if attended is NotImplemented else permute(attended, result, names[2])


def _find(*names: str) -> list[Any]:
    """The functions and methods of these names."""
    found = [getattr(place, name, None) for name in names for place in (torch, Tensor, functional)]
    return [each for each in found if each is not None]


_QUOTIENTS = _find("div", "true_divide", "__truediv__")
_DIFFERENCES = _find("sub", "subtract", "__sub__")
_CASTS = {Tensor.float: torch.float32, Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}
_RULES = {
    _multiply: [*_find("mul", "multiply", "__mul__", "__rmul__"), *_QUOTIENTS],
    _add: [*_find("add", "__add__", "__radd__"), *_DIFFERENCES],
    _fill: _find("masked_fill"),
    _choose: _find("where"),
    _limit: _find("max", "maximum"),
    _view: [*_find("view", "reshape", "flatten", "unflatten")],
    _same: [Tensor.contiguous],
    _cast: [*_CASTS, *_find("to", "type", "type_as")],
    _normalise: _find("softmax"),
    _drop: [functional.dropout],
    _attend: _find("matmul", "bmm", "__matmul__"),
    _attend_by_name: [torch.einsum],
}
FOLLOWED.update({func: rule for rule, functions in _RULES.items() for func in functions})
IN_PLACE.update(
    {
        getattr(Tensor, f"{name}_"): getattr(Tensor, name)
        for name in ("mul", "div", "add", "sub", "masked_fill")
    }
)
