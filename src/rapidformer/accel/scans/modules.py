"""Give the layers of a model our scans in place of those that transformers falls back to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.scans.delta_rule import apply_delta_rule
from rapidformer.accel.scans.state_space import scan_states
from rapidformer.compat.patches import Needed, Patch
from rapidformer.compat.transformers_scans import (
    SCANS,
    add_scans,
    copy_forward,
    find_unknown_scan,
    list_scans,
)
from rapidformer.overlay import Build, extend, get_own_class, put_fact

_LAYER = "scans"
_OURS: dict[str, Callable[..., Any]] = dict(
    zip(SCANS, (scan_states, apply_delta_rule), strict=True)
)


class _Names(Needed):
    """A layer calls scans by names added to their file."""


def apply(assembly: Assembly) -> str | None:
    """Change every layer that scans its tokens."""
    layers = [module for module in assembly.model.modules() if _suits(module)]
    problems = (find_unknown_scan(type(layer).forward) for layer in layers)
    problem = next(filter(None, problems), None)
    if problem is not None:
        assembly.applied.leave_off(problem)
        return None
    for layer in layers:
        build, added = _change(type(layer).forward)
        put_fact(layer, _Names(added))
        extend(layer, _LAYER, build, is_shared=True)
    return f"{len(layers)} layers" if layers else None


def _suits(layer: nn.Module) -> bool:
    # Hooks of other libraries may give a module a forward of its own.
    is_changed = "forward" in vars(layer) or type(layer).forward is not get_own_class(layer).forward
    return not is_changed and bool(list_scans(type(layer).forward))


@functools.cache
def _change(forward: Any) -> tuple[Build, Patch]:
    """One per function, not per class: a script may have given the class another one since."""
    scans = {name: _OURS[name] for name in list_scans(forward)}
    names = {name: f"{name}_of_rapidformer" for name in scans}
    members = {"forward": copy_forward(forward, names)}
    return lambda cls: members, add_scans(forward, names, scans)
