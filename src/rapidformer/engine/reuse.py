"""Reuse a model that an earlier engine of this process has already composed.

Notebooks train, evaluate and train again with one model. Switches are applied once: a second set of
hooks would add gradients twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from rapidformer.accel.parallelize import Parallelized
from rapidformer.config import Settings
from rapidformer.config.schema import get_settings
from rapidformer.config.switches import SWITCHES
from rapidformer.errors import RapidformerError

_RECORD = "rapidformer_switched"


class _Record:
    """What was switched on in a model. A copy of the model starts without it.

    It is kept in the model, not in a table: its hooks refer to the model, so a table would keep
    every model alive.
    """

    def __init__(
        self, asked: dict[str, Any] | None = None, parallelized: Parallelized | None = None
    ) -> None:
        self.asked = asked
        self.parallelized = parallelized

    def __deepcopy__(self, memo: Any) -> _Record:
        return _Record()

    def __reduce__(self) -> tuple[type[_Record], tuple[()]]:
        return _Record, ()


def switch_on_once(
    model: nn.Module, args: Settings, switch_on: Callable[[], Parallelized]
) -> Parallelized:
    """The result of ``switch_on``, or its earlier result for this model and settings."""
    asked = {name: getattr(args, name) for switch in SWITCHES for name in switch.settings}
    record: _Record = model.__dict__.get(_RECORD, _Record())
    before, parallelized = record.asked, record.parallelized
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
    model.__dict__[_RECORD] = _Record(asked, parallelized)
    return parallelized
