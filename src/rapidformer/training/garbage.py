"""Python's garbage collection, kept out of optimizer steps.

It starts whenever enough objects were created, and a full one walks all objects of the process,
half a second in a large run, while the device has nothing to do. What exists before the first step
(model, data, libraries) or after some steps (compiled code) stays until the end, so later
collections skip it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rapidformer.compat.patches import without_collections

_SHORT = 20
"""Steps of a run below which a full collection at the start would not pay off."""
_FREEZES_AFTER = 40
"""Uses of ``held_back``, two per step, after which compiled code is skipped, too."""


class GarbageCollection:
    """Collects between the steps inside ``with``; afterwards everything is as it was before."""

    def __init__(self, steps: int, freezes_after: int = _FREEZES_AFTER) -> None:
        """``steps`` is the length of the run; ``freezes_after`` counts uses of ``held_back``."""
        self._freezes_after, self._is_short = freezes_after, steps < _SHORT
        self._count, self._has_frozen = 0, False

    def __enter__(self) -> None:
        self._count = 0
        if not self._is_short and gc.isenabled():
            self._freeze()

    def __exit__(self, *_: Any) -> None:
        if self._has_frozen:
            gc.unfreeze()
            self._has_frozen = False

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """No collection inside, unless the user has turned it off altogether."""
        was_on = gc.isenabled()
        with without_collections():
            yield
        self._count += 1
        if self._count == self._freezes_after and was_on:
            self._freeze()

    def _freeze(self) -> None:
        # If the user has frozen objects, unfreezing ours later would release theirs, too.
        if self._has_frozen or gc.get_freeze_count() == 0:
            gc.collect()
            gc.freeze()
            self._has_frozen = True
