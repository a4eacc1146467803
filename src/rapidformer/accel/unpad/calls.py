"""A call of a model without padding, and the same call with it, once padding is read."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.later import have_changed, note_mode, note_version
from rapidformer.accel.unpad.kernels import inside, use_rows
from rapidformer.compat.torch_dispatch import tree_leaves
from rapidformer.errors import ConfigurationError
from rapidformer.log import warn_once
from rapidformer.optim.update import UpdateClock
from rapidformer.overlay import find_fact

_CURRENT: ContextVar[Call | None] = ContextVar("call", default=None)
_RECORDED: ContextVar[dict[nn.Module, Tensor] | None] = ContextVar("padded", default=None)


class Help(Enum):
    """What a rank needs of the others to repeat a forward pass."""

    NONE = "it can do so alone"
    NEEDED = "weights are sharded, and the others do not know"
    PROMISED = "the same, but the user says that padding is not read (--dynamic-shape on)"
    TOGETHER = "the others have a part of it (pipeline stages): all of them repeat the update"


@dataclass(eq=False, kw_only=True)
class Removal:
    """A fact on a model: whether its padding is removed."""

    is_trial: bool = False
    help_of_others: Help = Help.NONE
    rounds_up: bool = False
    """Whether the number of tokens is one of a few."""
    pads_attention: bool = False
    """Whether rows are padded for attention."""
    is_by_call: bool = False
    """Whether blocks get their rows from the call: their arguments do not show them."""
    only_in_graphs: bool = False
    """Whether only steps that are replayed as CUDA graphs, or might be, remove padding."""
    is_on: bool = True
    problem: str | None = None
    """Why padding is kept; None while it is removed."""
    yields: bool = False
    """Whether it is off for the sake of CUDA graphs."""
    clock: weakref.ref[UpdateClock] | None = None
    """Of the engine that trains the model."""
    has_packed: bool = False
    """Whether a last block has run on real tokens."""
    has_removed: bool = False
    """Whether this rank has removed padding in the current update of a pipeline."""
    is_missed: bool = False
    """Whether this rank needs what the others have removed in it."""
    _calls: list[weakref.ref[Call]] = field(default_factory=list, init=False)
    """Not a ``WeakSet``: a copy of the model would copy what they hold."""

    def get_step(self) -> int:
        """The number of the current step."""
        clock = self.clock() if self.clock is not None else None
        return 1 if clock is None else clock.updates + 1

    def begin(self, call: Call) -> None:
        """Note a call. Those of earlier steps cannot be repeated, and let go of all they need."""
        calls = [known for known in (reference() for reference in self._calls) if known is not None]
        for known in calls:
            if known.is_late:
                known.forget()
        self._calls = [weakref.ref(known) for known in (*calls, call) if not known.is_late]

    def turn_off(self, step: int, *, is_late: bool) -> None:
        """Keep padding from now on, and say why."""
        if self.is_on and not self.is_trial:
            self.warn(step, is_late=is_late)
        self.is_on = False
        self.problem = f"step {step} has read what the model returns for padding"

    def stop_yielding(self) -> None:
        """Remove padding again: there are no CUDA graphs."""
        self.is_on |= self.yields
        self.yields = False

    def warn(self, step: int, *, is_late: bool = False) -> None:
        """Say why padding is kept."""
        late = "that is NaN (0 for integers) this time: it was read after optimizer.step()"
        effect = late if is_late else "it was computed with padding"
        warn_once(
            f"--dynamic-shape: step {step} reads what the model returns for padding, so "
            f"{effect}. From here on, padding is not removed. To train faster, leave padding "
            "out: losses[mask], losses.masked_fill(~mask, 0) or torch.where(mask, losses, 0).",
            is_local=True,
        )


class Call:
    """One call of a model without padding."""

    def __init__(
        self,
        removal: Removal,
        run_padded: Callable[[], Any],
        device: torch.device,
        *,
        knows_labels: bool = False,
        is_promised: bool = False,
        labelled: int | None = None,
    ) -> None:
        self.is_running = False
        self._labelled = labelled
        self.tensors: list[weakref.ref[Any]] = []
        """All ``Unpadded`` that come from it."""
        self.is_promised = is_promised
        self.removal, self._knows_labels = removal, knows_labels
        self.chunks: dict[Any, Any] = {}
        """Where layers that scan have put its rows (``scanned_rows.py``)."""
        self._run_padded: Callable[[], Any] | None = run_padded
        self._enter_mode = note_mode(device)
        self._step = removal.get_step()
        self._padded: dict[nn.Module, Tensor] | None = None
        leaves: list[Any] = []
        if isinstance(run_padded, functools.partial):
            leaves = tree_leaves((run_padded.args, run_padded.keywords))
        self._inputs = [note_version(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        removal.begin(self)

    @property
    def is_repeated(self) -> bool:
        """Whether it was run again with padding: everything from it is then taken from there."""
        return self._padded is not None

    @property
    def trusts_labels(self) -> bool:
        """Whether labels were compared with the mask, and nothing else will be read: only
        transformers' own code runs, or somebody has promised it."""
        return self.is_promised or (self.is_running and self._knows_labels)

    @property
    def labelled(self) -> int | None:
        """How many tokens have a label at most, while the model's own loss may ask."""
        return self._labelled if self.is_running and self._knows_labels else None

    def run(self, forward: Callable[[], Any]) -> Any:
        """Run a model's forward pass as this call."""
        self.is_running = True
        try:
            with inside(_CURRENT, self):
                return forward()
        finally:
            self.is_running = False

    def find_padded(self, block: nn.Module) -> Tensor:
        """What a block returns with padding."""
        if self._padded is None:
            self._check()
            assert self._run_padded is not None
            padded: dict[nn.Module, Tensor] = {}
            with inside(_RECORDED, padded), use_rows(None), self._enter_mode():
                self._run_padded()
            self._padded = padded
        return self._padded[block]

    def forget(self) -> None:
        """Release what repeating it would need: kept outputs would keep whole graphs alive."""
        self._run_padded, self._inputs = None, []
        for tensor in (reference() for reference in self.tensors):
            if tensor is not None:
                tensor.recompute = None

    @property
    def is_late(self) -> bool:
        """Whether it cannot be repeated: the weights have changed since, or others have a part."""
        if self.removal.help_of_others is Help.TOGETHER:
            return True
        return self._padded is None and self.removal.get_step() != self._step

    def blame(self) -> None:
        """Padding was read: remove no more of it."""
        if self.removal.help_of_others is Help.TOGETHER:
            self.removal.is_missed = True  # what was read is NaN until the update is repeated
        else:
            self.removal.turn_off(self._step, is_late=self.is_late)

    def _check(self) -> None:
        if have_changed(self._inputs):
            raise ConfigurationError(
                "something reads what the model returns for padding, and the model's inputs were "
                "changed in place since. Leave padding out, or set --dynamic-shape off."
            )
        if self.removal.help_of_others is not Help.NONE:
            raise ConfigurationError(
                "something reads what the model returns for padding, and with sharded weights "
                "(ZeRO) one rank cannot compute that alone. Leave padding out (losses[mask], "
                "losses.masked_fill(~mask, 0)), or set --dynamic-shape off."
            )


def count_steps(model: nn.Module, clock: UpdateClock) -> None:
    """Let a model's calls know in which step they are."""
    removal = find_fact(model, Removal)
    if removal is not None:
        removal.clock = weakref.ref(clock)


def get_call() -> Call | None:
    """The call that is running without padding."""
    return _CURRENT.get()


def record_padded(block: nn.Module, output: Tensor) -> None:
    """Keep what a block returns with padding, if a call is being repeated."""
    recorded = _RECORDED.get()
    if recorded is not None:
        recorded[block] = output
