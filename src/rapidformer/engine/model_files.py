"""The model's own files, and who writes them.

Where each rank holds everything, rank 0 does, and needs nobody: ``if rank == 0:
engine.export(...)`` is as good as a call on every rank. Where the state is split, all must call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.export import export_model, gather_weights, list_weights, merge_export
from rapidformer.checkpoint.state import TrainingState, describe_split
from rapidformer.checkpoint.writing import writing
from rapidformer.dist.attendance import attending, run_by_first
from rapidformer.dist.collectives import is_alone, wait_for_all
from rapidformer.dist.heartbeat import in_phase
from rapidformer.engine.model import RunModel
from rapidformer.engine.runtime import Runtime

_ALONE = (
    "the checkpoint has no random states of the other ranks, so a resumed run draws other dropout "
    "masks there. Call it on every rank, outside of `if rank == 0`."
)


class ModelFiles:
    """Writes the model, of whatever layout, and gathers it."""

    def __init__(
        self, runtime: Runtime, model: RunModel, collect: Callable[[], TrainingState]
    ) -> None:
        self._runtime, self._model, self._collect = runtime, model, collect

    def attending(self, call: str) -> AbstractContextManager[bool]:
        """Enter a call that saves the whole state; gives whether this rank takes part in it."""
        return attending(call, needs_all=self._describe_split(), alone=_ALONE)

    def _describe_split(self) -> str | None:
        """Why rank 0 cannot save by itself, if it cannot."""
        return None if is_alone() else describe_split(self._collect())

    def gather_weights(self, *, everywhere: bool = False) -> dict[str, Any]:
        """All weights by name, whole, on rank 0; empty elsewhere.

        With ``everywhere``, all ranks have them if they are not split.
        """
        model, split = self._model.parallelized.model, self._describe_split()
        if split is None:
            return list_weights(model) if everywhere else gather_weights(model)
        with attending("gathering the weights", needs_all=split):
            weights = self._gather_from_deepspeed()
            return gather_weights(model) if weights is None else weights

    def export(
        self, folder: str | Path, processor: Any = None, *, merge: bool | None = None
    ) -> Path:
        """Save the model alone; see ``engine.export``."""
        adapter, model = self._model.adapter, self._model.parallelized.model
        if merge is None:
            merge = adapter is not None and adapter.base is None and not adapter.is_prompt
            if merge and not hasattr(model, "config"):
                adapter, merge = None, False

        def write() -> None:
            with writing(Path(folder)):
                export_model(
                    model, Path(folder), self._runtime.topology, processor=processor,
                    weights=self._gather_from_deepspeed(), adapter=adapter, merges=merge,
                )  # fmt: skip

        with in_phase("save"):  # on all ranks
            self.run_by_first(f"export({str(folder)!r})", write)
        return Path(folder)

    def run_by_first(self, call: str, action: Callable[[], None]) -> None:
        """Write the model: rank 0 does so whether the others come or not, unless they must."""
        if (split := self._describe_split()) is None:
            run_by_first(call, action)
            return
        with attending(call, needs_all=split):
            action()

    def _gather_from_deepspeed(self) -> dict[str, Any] | None:
        """All weights if DeepSpeed holds them; None otherwise. Weights are resharded before."""
        parallelized = self._model.parallelized
        parallelized.settle()
        state = parallelized.deepspeed.state if parallelized.deepspeed is not None else None
        return None if state is None else state.gather_weights()

    def export_into(self, folder: str | Path, processor: Any = None) -> None:
        """Save the model into a folder that may hold other files, which stay."""
        target = Path(folder)

        def write() -> None:
            exported = self.export(target / ".exported", processor)
            if self._runtime.is_main:
                merge_export(exported, target)
            wait_for_all()

        self.run_by_first(f"saving a model to {str(target)!r}", write)
