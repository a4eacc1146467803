"""A linear head whose logits may be computed later, and whether that is still possible."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from rapidformer.accel.fused_loss.chunked import Losses
from rapidformer.accel.later import have_changed, note_version
from rapidformer.compat.patches import Entry, Patch
from rapidformer.compat.torch_modules import get_parameter_table
from rapidformer.dist.vocabulary import VocabularySlice
from rapidformer.dist.whole import get_shard
from rapidformer.errors import ConfigurationError


class Head:
    """The two ways to use a linear head, while its inputs are those of its call."""

    def __init__(
        self,
        module: nn.Linear,
        call: Callable[..., Any],
        lend: Callable[[], tuple[Tensor, Tensor | None, VocabularySlice | None]] | None,
        hidden: Tensor,
    ) -> None:
        self.compute_losses: Callable[..., Losses] = call
        """Rows of hidden states, their labels, a recipe and maybe a teacher -> the losses."""
        self.compute: Callable[[Tensor], Tensor] = functools.partial(call, is_wanted=True)
        self.lend = lend
        """Weight, bias and slice of the vocabulary, without gradients: of a head that teaches, if
        it is but a product."""
        self._module = module
        self._versions = [note_version(tensor) for tensor in (hidden, *self._list_weights())]
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        """Weights whose memory was handed out (``.data``), each with a number per row."""
        self._is_outdated = False
        _heads.add(self)

    def note_step(self, stepped: set[int]) -> None:
        """Note that an optimizer has changed the parameters with these ids."""
        # Looked up now: a sharded weight is another object between calls.
        self._is_outdated |= any(id(p) in stepped for p in self._list_weights())

    def note_handing_out(self, weight: Tensor) -> None:
        """Note that a weight can be changed from now on without torch counting it."""
        is_ours = any(p is weight for p in self._list_weights())
        if is_ours and id(weight) not in self._rows:
            self._rows[id(weight)] = weight, _measure_rows(weight)

    def check_inputs(self) -> None:
        """Refuse to compute from weights or hidden states that are no longer the same."""
        is_changed = have_changed(self._versions)
        is_changed |= any(not torch.equal(_measure_rows(w), m) for w, m in self._rows.values())
        if self._is_outdated or is_changed:
            raise ConfigurationError(
                "The logits were asked for after the weights or hidden states that they are "
                "computed from had changed, by an optimizer step for example. Ask before, or set "
                "--fused-loss off."
            )

    def _list_weights(self) -> list[Tensor]:
        return [p for p in get_parameter_table(self._module).values() if p is not None]


def _measure_rows(weight: Tensor) -> Tensor:
    """The norm of each row: a copy of the weight would be too large."""
    with torch.no_grad():
        local = get_shard(weight).detach()
        return local.clone() if local.dim() < 2 else local.norm(dim=-1, dtype=torch.float32)


_heads: weakref.WeakSet[Head] = weakref.WeakSet()
"""Those whose logits still exist."""


class _NoteStep:
    """A hook that runs after every optimizer step."""

    may_be_skipped = True
    """A step that a CUDA graph replays runs no hooks, and nobody holds its logits."""

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not _heads:
            return
        # Not by their versions: torch's fused optimizers do not count their changes.
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for head in _heads:
            head.note_step(stepped)


def _build_data(before: Any) -> property:
    plain: Any = before or Tensor.data

    def get(self: Tensor) -> Tensor:
        for head in list(_heads):
            head.note_handing_out(self)
        data: Tensor = plain.__get__(self)
        return data

    return property(get, plain.__set__)


DATA_ACCESS = Patch(lambda: [Entry(kind, "data", _build_data) for kind in (nn.Parameter, DTensor)])
"""Inside, heads know when a script takes ``weight.data``, whose changes torch does not count."""


def watch_steps() -> RemovableHandle:
    """Let heads know when an optimizer changes their weights, until the hook is removed."""
    return register_optimizer_step_post_hook(_NoteStep())
