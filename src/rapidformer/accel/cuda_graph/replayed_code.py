"""The code that a replay replaces: what it does besides computing, and what it depends on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.cuda_graph.snapshot import Snapshot
from rapidformer.accel.data_parallel import GradientReducer
from rapidformer.accel.split.own_code import runs_no_hook
from rapidformer.compat.torch_modules import list_global_hook_tables, list_hook_tables
from rapidformer.compat.torch_tensors import has_gradient_hooks
from rapidformer.compat.transformers_models import find_captured, list_captured
from rapidformer.models.side_effects.examination import Description, Examination
from rapidformer.models.watched import describe_watched, find_watched

_MOST_CHANGES = 8
"""How often what the code reads may change, with no replay in between."""


class ReplayedCode:
    """The user's steps and the model's code: checks raise if a replay may not replace them."""

    def __init__(self, steps: Sequence[Callable[..., Any]], model: nn.Module) -> None:
        self.steps, self._model = steps, model
        self.examination = Examination(steps, model)
        modules = self.examination.modules
        self._tables = [(module, table) for module in modules for table in list_hook_tables(module)]
        self._known_hooks: list[Callable[..., Any]] = []
        self._described: Description | None = None
        """What the code depended on when it was last asked."""
        self._changes = 0

    def check_effects(self) -> None:
        """Refuse code that does something that a replay would not do."""
        effect = self.examination.effect
        if effect is not None:
            raise NotRepeatableError(str(effect))

    def describe(self) -> Description:
        """What the code can see beside its batch and the weights; raises if that always changes."""
        before, now = self._described, self.examination.describe()
        self._described = now
        if before is None or before == now:
            return now
        self._changes += 1
        if self._changes > _MOST_CHANGES:
            name = self.examination.find_changing(before, now)
            raise NotRepeatableError(
                f"{name} has another value in every step: keep it in a tensor, "
                "and change that in place"
            )
        return now

    def take_snapshot(self, device: torch.device) -> Snapshot:
        """The state that the code may change."""
        return Snapshot(self.examination.list_tensors(), device)

    def note_replay(self) -> None:
        """What was recorded has come again."""
        self._changes = 0

    def find_kept(self, blocks: Collection[nn.Module]) -> frozenset[str] | None:
        """Which outputs of blocks transformers keeps now; None: hooks may do something else."""
        kept = list_captured()
        for module, table in [pair for pair in self._tables if pair[1]]:  # hardly any
            for hook in table.values():
                name = find_captured(hook)
                if name is None or (name in kept and module not in blocks):
                    return None
        return kept

    def check_hooks(self, parameters: Sequence[nn.Parameter], exchange: object = None) -> None:
        """Refuse hooks but those of a reducer, which may be registered at any time."""
        if any(list_global_hook_tables()):
            raise NotRepeatableError("a replay would not run the hooks on all modules")
        hooks = [hook for _, table in self._tables if table for hook in table.values()]
        if hooks != self._known_hooks:
            watched = find_watched(dict(self._model.named_modules()))
            if watched:
                names = describe_watched(watched)
                raise NotRepeatableError(f"a replay would not run the hooks on {names}")
            self._known_hooks = hooks
        reduces = exchange.on_gradient if isinstance(exchange, GradientReducer) else None
        if has_gradient_hooks(parameters, lambda hook: hook == reduces or runs_no_hook(hook)):
            raise NotRepeatableError("a replay would not run the hooks on its parameters")
