"""``Settings``: all sections joined, flat and frozen; an instance of each section's type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rapidformer.config import objective_sections, sections, task_sections
from rapidformer.foreign_names import get_foreign_flags
from rapidformer.nearest import find_nearest


@dataclass(kw_only=True, frozen=True)
class Settings(
    task_sections.RunArguments, task_sections.ModelArguments, task_sections.DataArguments,
    objective_sections.PreferenceArguments, objective_sections.GrpoArguments,
    objective_sections.ReferenceArguments, objective_sections.DistillationArguments,
    objective_sections.EmbeddingArguments, objective_sections.SpeechArguments,
    task_sections.GenerationArguments,
    sections.TrainingLengthArguments, sections.OptimizerArguments, sections.AdapterArguments,
    sections.AccelerationArguments, sections.ParallelArguments, sections.CheckpointArguments,
    sections.LoggingArguments, sections.LaunchArguments,
):  # fmt: skip
    """Every setting of a run, with the user's own extra flags and the origin of each value."""

    rank: int = 0
    world_size: int = 1
    extras: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """If built directly, not parsed, whatever differs from the default came from code."""
        if not self.sources:
            defaults = {f.name: f.default for f in dataclasses.fields(self) if f.name not in _OWN}
            given = [name for name in defaults if getattr(self, name) != defaults[name]]
            object.__setattr__(self, "sources", dict.fromkeys(given, "code"))

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    @property
    def num_replicas(self) -> int:
        """Ranks with different tokens, over which gradients are summed and state is sharded."""
        return self.data_parallel_size * self.context_parallel_size

    def is_given(self, name: str) -> bool:
        """Whether the user gave it, by flag, file or code."""
        source = self.sources.get(name, "default")
        return source != "default" and not source.startswith("derived")

    def is_changed(self, name: str) -> bool:
        """Whether the user gave another value than the default: ``arguments.yaml`` gives all."""
        return self.is_given(name) and getattr(self, name) != getattr(Settings, name)

    @property
    def keeps_nothing(self) -> bool:
        """Whether the run has no folder: ``--save none``."""
        return self.save is None and self.is_given("save")

    def keep_nothing(self, source: str) -> Settings:
        """A copy without a run folder."""
        return dataclasses.replace(self, save=None, sources={**self.sources, "save": source})

    def replace(self, source: str, **values: Any) -> Settings:
        """A copy with other values; ``--print-config`` shows ``source`` as their origin."""
        changed = {name: value for name, value in values.items() if getattr(self, name) != value}
        sources = {**self.sources, **dict.fromkeys(changed, source)}
        return dataclasses.replace(self, sources=sources, **changed)

    def __getattr__(self, name: str) -> Any:
        """Other systems' names, the ``no_...`` forms, and the user's own extra flags."""
        if name.startswith("__"):
            raise AttributeError(name)
        extras = self.__dict__.get("extras", {})
        if name in extras:
            return extras[name]
        aliases = get_foreign_flags().aliases
        if name in aliases:
            return getattr(self, aliases[name])
        if name.startswith("no_") and name[3:] in _FIELD_NAMES:
            return not getattr(self, name[3:])
        near = find_nearest(name, [*_FIELD_NAMES, *aliases, *extras])
        hint = f"; did you mean {near!r}?" if near else ""
        raise AttributeError(f"no setting {name!r}{hint}")


_OWN = ("rank", "world_size", "extras", "sources")
_FIELD_NAMES = frozenset(f.name for f in dataclasses.fields(Settings))
