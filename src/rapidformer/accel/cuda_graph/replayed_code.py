"""The code that a replay replaces: what it does besides computing, and what it depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from rapidformer.accel.cuda_graph.examination import Examination
from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.data_parallel import GradientReducer
from rapidformer.accel.split.own_code import runs_no_hook
from rapidformer.compat.torch_modules import list_global_hook_tables, list_hook_tables
from rapidformer.compat.torch_tensors import has_gradient_hooks
from rapidformer.models.watched import describe_watched, find_watched


class ReplayedCode:
    """The user's steps and the model's code: checks raise if a replay may not replace them."""

    def __init__(self, steps: Sequence[Callable[..., Any]], model: nn.Module) -> None:
        self.steps, self._model = steps, model
        self.examination = Examination(steps, model)
        modules = self.examination.modules
        self._tables = [table for module in modules for table in list_hook_tables(module)]
        self._known_hooks: list[Callable[..., Any]] = []

    def check_effects(self) -> None:
        """Refuse code that does something that a replay would not do."""
        effect = self.examination.effect
        if effect is not None:
            raise NotRepeatableError(str(effect))

    @property
    def has_hooks(self) -> bool:
        """Whether there are hooks, if only a library's."""
        return any(self._tables)

    def check_hooks(self, parameters: Sequence[nn.Parameter], exchange: object = None) -> None:
        """Refuse hooks but those of a reducer, which may be registered at any time."""
        if any(list_global_hook_tables()):
            raise NotRepeatableError("a replay would not run the hooks on all modules")
        hooks = [hook for table in self._tables if table for hook in table.values()]
        if hooks != self._known_hooks:
            watched = find_watched(dict(self._model.named_modules()))
            if watched:
                names = describe_watched(watched)
                raise NotRepeatableError(f"a replay would not run the hooks on {names}")
            self._known_hooks = hooks
        reduces = exchange.on_gradient if isinstance(exchange, GradientReducer) else None
        if has_gradient_hooks(parameters, lambda hook: hook == reduces or runs_no_hook(hook)):
            raise NotRepeatableError("a replay would not run the hooks on its parameters")
