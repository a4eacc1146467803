"""The frozen models of a run: those that its script or task provides, and the reference.

The reference is made when the model has the weights that the run starts from: once it is composed,
and before a checkpoint to resume from is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from rapidformer.dist.seeding import RandomState
from rapidformer.engine import RapidformerEngine
from rapidformer.engine.reference import (
    build_reference,
    build_untouched,
    compute_start_checksums,
    renew_start,
)
from rapidformer.errors import ConfigurationError
from rapidformer.log import get_logger
from rapidformer.objectives import Objective
from rapidformer.objectives.objective import AskedModel
from rapidformer.objectives.reference import REFERENCE, Precomputed
from rapidformer.training.precomputed import (
    AnswerCollator,
    AnsweredRows,
    ReferenceFolder,
    prepare_answers,
)

Frozen = Mapping[str, nn.Module | AskedModel]


class FrozenModels:
    """What an objective may ask besides the model that learns."""

    def __init__(
        self,
        engine: RapidformerEngine,
        build_objective: Callable[[], Objective],
        provide: Callable[[], Frozen],
    ) -> None:
        self._engine, self._build_objective, self._provide = engine, build_objective, provide
        self._models: Frozen | None = None
        self._answered: list[AnsweredRows] = []
        self._collate: AnswerCollator | None = None

    @property
    def needs_reference(self) -> bool:
        """Whether the objective asks for the model that the run starts from."""
        return REFERENCE in self._build_objective().frozen

    def get(self) -> Frozen:
        """All of them by name; made once, without a trace in the run's random numbers."""
        if self._models is None:
            state = RandomState(self._engine.device)
            self._models = self._provide()
            state.restore()
        return self._models

    def number_rows(
        self, train: Any, validation: Any, test: Any, collate: Any
    ) -> tuple[Any, Any, Any, Any]:
        """The data of a run, whose rows will know the answers of a precomputed reference."""
        if not (self._engine.args.precompute_reference and self.needs_reference):
            return train, validation, test, collate
        self._collate = AnswerCollator(collate)
        named = {"train": train, "validation": validation, "test": test}
        answered = {n: AnsweredRows(data, n) for n, data in named.items() if data is not None}
        self._answered = list(answered.values())
        return (*map(answered.get, named), self._collate)

    def before_compose(self) -> None:
        """Let the engine keep a copy of the model that is about to be trained, if one is needed."""
        is_computed = self._engine.args.precompute_reference
        self._engine.model.keeps_start = self.needs_reference and not is_computed

    def take_reference(self, resume: Path | None) -> None:
        """Make the reference of the weights that the model has now; ``resume`` must have them, too.

        Every rank must call this.
        """
        if not self.needs_reference or REFERENCE in self.get():
            return
        engine, run = self._engine, self._engine.model
        if engine.args.precompute_reference and self._collate is None:
            raise ConfigurationError(
                "--precompute-reference needs the data of a task or a template, not loaders that "
                "are ready: leave it out."
            )
        folder = ReferenceFolder(engine.args, resume)
        digest = folder.check_weights(compute_start_checksums(run, engine.runtime.topology))
        reference: AskedModel
        if self._collate is not None:
            said = prepare_answers(
                engine, self._answered, self._collate, self._build_objective(),
                build_untouched(run), folder, digest,
            )  # fmt: skip
            reference = Precomputed()
        else:
            if engine.args.finetune:
                renew_start(run)
            reference = built = build_reference(run)
            said = built.kind
        if engine.is_main:
            get_logger().info("reference %s", said)
        self._models = {**self.get(), REFERENCE: reference}
