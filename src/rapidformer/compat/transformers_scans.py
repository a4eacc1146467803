"""The functions by which transformers' layers scan tokens, where no package brings a kernel.

A layer's ``forward`` calls them by their names in its file. It can be copied with other functions
under these names, so that nothing in the process changes and a compiler sees plain calls.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import FunctionType
from typing import Any

from rapidformer.compat.patches import describe_difference

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


def list_scans(cls: type) -> list[str]:
    """The scans that a layer's ``forward`` calls, and that no package has a kernel for."""
    forward: Any = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    if not isinstance(forward, FunctionType):
        return []
    called = [name for name in SCANS if name in forward.__code__.co_names]
    modules = {name: getattr(forward.__globals__.get(name), "__module__", "") for name in called}
    is_known = "transformers.models."
    return [n for n in called if modules[n].startswith(is_known) and not find_spec(_PACKAGES[n])]


def find_unknown_scan(cls: type) -> str | None:
    """How a scan that a layer calls differs from the one we know; None if none does."""
    owner = inspect.getmodule(cls)
    names = list_scans(cls)
    differences = (describe_difference("transformers", owner, n, _KNOWN[n]) for n in names)
    return next(filter(None, differences), None)


def copy_forward(cls: type, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A layer's ``forward`` with other functions under these names.

    Its globals have no ``__name__``: a compiler would take them for those of the layer's module.
    """
    forward: Any = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    values = {k: v for k, v in forward.__globals__.items() if k != "__name__"}
    copied = FunctionType(
        forward.__code__, {**values, **functions}, forward.__name__, forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
    copied.__kwdefaults__ = forward.__kwdefaults__
    return functools.wraps(forward)(copied)
