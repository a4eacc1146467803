"""The code that a replay replaces: what it does besides computing, and what it depends on."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import nn

from rapidformer.accel.cuda_graph.examination import Examination
from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.data_parallel import GradientReducer
from rapidformer.accel.dropout_seeds import DROPOUTS
from rapidformer.accel.split.own_code import runs_no_hook
from rapidformer.compat.torch_modules import list_hook_tables
from rapidformer.compat.torch_tensors import has_gradient_hooks
from rapidformer.models.watched import describe_watched, find_watched

_IS_TRAINING = operator.attrgetter("training")


class ReplayedCode:
    """The user's steps and the model's code: checks raise if a replay may not replace them."""

    def __init__(self, steps: Sequence[Callable[..., Any]], model: nn.Module) -> None:
        self.steps, self._model = steps, model
        self.examination = Examination(steps, model)
        modules = list(self.examination.modules)
        self._dropouts = [module for module in modules if isinstance(module, DROPOUTS)]
        self._hooks = [table for module in modules for table in list_hook_tables(module)]
        self._hook_count = 0

    def check_effects(self) -> None:
        """Refuse code that does something that a replay would not do."""
        effect = self.examination.effect
        if effect is not None:
            raise NotRepeatableError(str(effect))

    @property
    def has_hooks(self) -> bool:
        """Whether there are hooks, if only a library's."""
        return any(self._hooks)

    def check_hooks(
        self, parameters: Sequence[nn.Parameter], reducer: GradientReducer | None = None
    ) -> None:
        """Refuse hooks but the reducer's, which may be registered at any time."""
        count = sum(map(len, self._hooks))
        if count != self._hook_count:
            watched = find_watched(dict(self._model.named_modules()))
            if watched:
                names = describe_watched(watched)
                raise NotRepeatableError(f"a replay would not run the hooks on {names}")
            self._hook_count = count
        reduces = reducer and reducer.on_gradient
        if has_gradient_hooks(parameters, lambda hook: hook == reduces or runs_no_hook(hook)):
            raise NotRepeatableError("a replay would not run the hooks on its parameters")

    def describe(self) -> tuple[Hashable, ...]:
        """What a forward pass depends on, apart from its batch and the weights."""
        training = tuple(map(_IS_TRAINING, self.examination.modules))
        dropouts = tuple(module.p for module in self._dropouts)
        return training, dropouts, self.examination.read_values()

    def find_changing(self, before: tuple[Hashable, ...], now: tuple[Hashable, ...]) -> str:
        """The name of what differs between two results of ``describe``."""
        return self.examination.find_changing(before[-1], now[-1]) or "a module's mode or dropout"
