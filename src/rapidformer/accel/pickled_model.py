"""``torch.save(model)`` of a composed model writes the plain model, which loads without us.

Its overlays are classes of this process, and its facts and hooks are about this run. So what is
pickled is a copy from which all changes are taken off; its tensors are the model's own.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from rapidformer.accel.applied import Applied
from rapidformer.overlay import (
    FACTS,
    drop_fact,
    extend,
    find_fact,
    list_layers,
    put_fact,
    return_to,
)

_INSTEAD = (
    "Save model.state_dict() or call engine.export(folder), or save the model after "
    "engine.close(), which makes it the plain model again."
)


class _Changes:
    """A fact on a model: what was changed in it. A copy of the model does not know."""

    def __init__(self, applied: Applied | None) -> None:
        self.applied = applied

    def __deepcopy__(self, memo: Any) -> _Changes:
        return _Changes(None)


def write_plainly(model: nn.Module, applied: Applied) -> None:
    """Before anything else is applied, so that saved files contain none of it."""
    put_fact(model, _Changes(applied))
    applied.on_close(drop_fact, model, _Changes)
    if "pickle" in list_layers(model):  # it is a copy of a composed model
        return
    own_class = type(model)
    extend(model, "pickle", _build_members, is_shared=True)
    applied.changes.append((model, partial(return_to, model, own_class)))
    applied.on_close(return_to, model, own_class)


def _build_members(cls: type[nn.Module]) -> dict[str, Any]:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        # Later protocols name the class of what is pickled, which is the overlay.
        return _copy_plainly(self).__reduce_ex__(1)

    return {"__reduce_ex__": reduce}


def _copy_plainly(model: nn.Module) -> nn.Module:
    """The plain model around the same tensors."""
    changes = find_fact(model, _Changes)
    applied = changes.applied if changes is not None else None
    if applied is None or applied.is_closed:
        raise pickle.PicklingError(
            "this model is a copy of one that an engine has composed, and cannot be pickled. Save "
            "its state_dict(), or copy the model before compose."
        )
    if not applied.plain.are_untouched():
        raise pickle.PicklingError(
            f"this model's weights are split over the ranks or were replaced: it cannot be "
            f"pickled. {_INSTEAD}"
        )
    kept = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    memo: dict[int, Any] = dict(kept)
    plain: nn.Module = copy.deepcopy(model, memo)
    for owner, undo in reversed(applied.changes):
        if id(owner) in memo:
            undo.func(*(memo.get(id(each), each) for each in undo.args))
    for handle in applied.hooks:
        for table in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            memo.get(id(table()), {}).pop(handle.id, None)
    for module in plain.modules():
        vars(module).pop(FACTS, None)
    return plain
