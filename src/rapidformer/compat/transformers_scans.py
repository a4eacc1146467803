"""The functions by which transformers' layers scan tokens, where no package brings a kernel.

A layer's ``forward`` calls them by their names in its file. It is copied, with its decorators, to
call ours by names that are added there while a layer needs them: no function of transformers is
replaced, a compiler sees plain calls, and whatever else the file holds is looked up as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import torch

from rapidformer.compat.patches import Entry, Patch, describe_difference
from rapidformer.compat.torch_dispatch import is_transformed

PRIVATE_NAMES: dict[str, str] = {}
_STATE_SPACE, _DELTA_RULE = SCANS = ("mamba2_chunk_scan", "torch_chunk_gated_delta_rule")
_PACKAGES = {_STATE_SPACE: "mamba_ssm", _DELTA_RULE: "fla"}
"""Those whose kernels transformers uses instead."""
_KNOWN = {
    _STATE_SPACE: [
        "hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states",
        "dt_softplus", "dt_limit", "return_final_states", "kwargs",
    ],
    _DELTA_RULE: [
        "query", "key", "value", "g", "beta", "chunk_size", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "kwargs",
    ],
}  # fmt: skip


def list_scans(forward: Any) -> list[str]:
    """The scans that a layer's ``forward`` calls, and that no package has a kernel for."""
    names = _list_names(forward)
    return [name for name in SCANS if name in names and not find_spec(_PACKAGES[name])]


def find_scans(forward: Any) -> list[Any]:
    """The functions that stand in a file now for the scans that a layer's ``forward`` calls."""
    names = [name for name in SCANS if name in _list_names(forward)]
    return [_unwrap(forward).__globals__.get(name) for name in names]


def has_fused_output(forward: Any) -> bool:
    """Whether a kernel of a package reads the weight of a layer's ``out_proj``: nobody calls it."""
    is_fused = any(name.endswith("split_conv1d_scan_combined") for name in _list_names(forward))
    return is_fused and find_spec(_PACKAGES[_STATE_SPACE]) is not None


def _list_names(forward: Any) -> tuple[str, ...]:
    function = _unwrap(forward)
    return function.__code__.co_names if isinstance(function, FunctionType) else ()


def find_unknown_scan(forward: Any) -> str | None:
    """How a scan that a layer calls differs from the one we know; None if none does."""
    values = _unwrap(forward).__globals__
    for name in list_scans(forward):
        scan = values.get(name)
        if not getattr(scan, "__globals__", {}).get("__name__", "").startswith("transformers."):
            return f"{name} in {values['__name__']} is not a function of transformers"
        owner = SimpleNamespace(**{name: scan})
        difference = describe_difference("transformers", owner, name, _KNOWN[name])
        if difference is not None:
            return difference
    return None


def copy_forward(forward: Any, names: Mapping[str, str]) -> Callable[..., Any]:
    """A layer's ``forward``, and its decorators, that calls scans by other names."""
    inner, code, closure = _find_inner(forward), forward.__code__, forward.__closure__
    if inner is not None:
        copied = copy_forward(inner, names)
        closure = tuple(CellType(copied) if _holds(cell, inner) else cell for cell in closure)
    else:
        code = code.replace(co_names=tuple(names.get(name, name) for name in code.co_names))
    result = FunctionType(
        code, forward.__globals__, forward.__name__, forward.__defaults__, closure
    )
    result.__kwdefaults__ = forward.__kwdefaults__
    return functools.wraps(forward)(result)


def add_scans(
    forward: Any, names: Mapping[str, str], scans: Mapping[str, Callable[..., Any]]
) -> Patch:
    """Inside, the file of a layer's ``forward`` has scans of ours by these names."""
    values = _unwrap(forward).__globals__
    return Patch(
        lambda: [
            Entry(values, ours, functools.partial(_build_choice, values, name, scans[name]))
            for name, ours in names.items()
        ]
    )


def _build_choice(
    values: dict[str, Any], name: str, ours: Callable[..., Any], _: None
) -> Callable[..., Any]:
    """Our scan, unless transformers' own has been replaced since, or the call is transformed."""
    theirs = values[name]

    def scan(*args: Any, **kwargs: Any) -> Any:
        chosen = values[name]
        if chosen is theirs and not is_transformed():
            chosen = ours
        return chosen(*args, **kwargs)

    # For lengths that vary, compiling them took 40 and 60 s, and made them no faster.
    plain: Callable[..., Any] = torch.compiler.disable(scan)
    return plain


def _unwrap(function: Any) -> Any:
    """What is inside a function's decorators."""
    while (inner := _find_inner(function)) is not None:
        function = inner
    return function


def _find_inner(function: Any) -> Any | None:
    """What a decorated function calls; None if it is plain, or does not keep that in a cell."""
    inner = getattr(function, "__wrapped__", None)
    cells = getattr(function, "__closure__", None) or ()
    return inner if inner is not None and any(_holds(cell, inner) for cell in cells) else None


def _holds(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is still empty
        return False
