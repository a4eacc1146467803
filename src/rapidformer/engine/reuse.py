"""Reuse a model that an earlier engine of this process has already composed.

Notebooks train, evaluate and train again with one model. Switches are applied once: a second set of
hooks would add gradients twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from rapidformer.accel.parallelize import Parallelized
from rapidformer.config import Settings
from rapidformer.config.schema import get_settings
from rapidformer.config.switches import SWITCHES
from rapidformer.errors import RapidformerError

_SWITCHED: WeakKeyDictionary[nn.Module, tuple[dict[str, Any], Parallelized]] = WeakKeyDictionary()


def switch_on_once(
    model: nn.Module, args: Settings, switch_on: Callable[[], Parallelized]
) -> Parallelized:
    """The result of ``switch_on``, or its earlier result for this model and settings."""
    asked = {name: getattr(args, name) for switch in SWITCHES for name in switch.settings}
    before, parallelized = _SWITCHED.get(model, (None, None))
    if before is not None and parallelized is not None:
        if parallelized.deepspeed is not None:
            raise RapidformerError(
                "DeepSpeed already holds this model and cannot start again: load the model again."
            )
        if before == asked:
            return parallelized
        plain = {name: get_settings()[name].default for name in asked}
        if args.world_size > 1 or before != plain:
            changed = [name for name in asked if before[name] != asked[name]]
            raise RapidformerError(
                "this model was composed earlier with other settings "
                f"({', '.join('--' + name.replace('_', '-') for name in changed)}), which cannot "
                "be undone: load the model again."
            )
    parallelized = switch_on()
    _SWITCHED[model] = asked, parallelized
    return parallelized
