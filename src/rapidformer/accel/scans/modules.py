"""Give the layers of a model our scans in place of those that transformers falls back to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.scans.delta_rule import apply_delta_rule
from rapidformer.accel.scans.state_space import scan_states
from rapidformer.compat.transformers_scans import (
    SCANS,
    copy_forward,
    find_unknown_scan,
    list_scans,
)
from rapidformer.overlay import extend, get_own_class

_LAYER = "scans"
_OURS = {
    # Not compiled: for lengths that vary, that took 40 and 60 s, and made them no faster.
    name: torch.compiler.disable(scan)
    for name, scan in zip(SCANS, (scan_states, apply_delta_rule), strict=True)
}


def apply(assembly: Assembly) -> str | None:
    """Change every layer that scans its tokens."""
    layers = [module for module in assembly.model.modules() if _suits(module)]
    problems = (find_unknown_scan(get_own_class(layer)) for layer in layers)
    problem = next(filter(None, problems), None)
    if problem is not None:
        assembly.applied.leave_off(problem)
        return None
    for layer in layers:
        extend(layer, _LAYER, _build_layer, is_shared=True)
    return f"{len(layers)} layers" if layers else None


def _suits(layer: nn.Module) -> bool:
    cls = get_own_class(layer)
    return type(layer).forward is cls.forward and bool(list_scans(cls))


def _build_layer(cls: Any) -> dict[str, Any]:
    names = list_scans(cls)
    return {"forward": copy_forward(cls, {name: _OURS[name] for name in names})}
