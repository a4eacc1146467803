"""What labels there are: the classes of the data as a model learns them, and those it has learnt.

What a reader would get wrong: `LABEL_0`, `LABEL_1`, ... are no names but what transformers writes
where nobody named the classes; a model without any classifier has two of them all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SINGLE = "single_label_classification"
MULTI = "multi_label_classification"
REGRESSION = "regression"


@dataclass(frozen=True, kw_only=True)
class LabelSpace:
    """The labels of the data, and how a value of it becomes one."""

    problem_type: str
    names: tuple[str, ...] = ()
    ids: Mapping[Any, int] = field(default_factory=dict)
    is_multi_hot: bool = False

    @property
    def num_labels(self) -> int:
        return 1 if self.problem_type == REGRESSION else len(self.names)

    def encode(self, value: Any) -> Any:
        if self.problem_type == REGRESSION:
            return float(value)
        if self.problem_type == SINGLE:
            return self.ids[value]
        if self.is_multi_hot:
            return [float(item) for item in value]
        present = {self.ids[item] for item in value}
        return [float(index in present) for index in range(len(self.names))]

    def get_model_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "problem_type": self.problem_type,
            "num_labels": self.num_labels,
        }
        if self.problem_type != REGRESSION:
            settings["id2label"] = dict(enumerate(self.names))
            settings["label2id"] = {name: index for index, name in enumerate(self.names)}
        return settings


@dataclass(frozen=True, kw_only=True)
class ModelClasses:
    """What a fine-tuned model tells apart; nothing for a model that has no classifier yet."""

    outputs: tuple[str, ...] = ()
    problem_type: str | None = None

    @property
    def count(self) -> int:
        return len(self.outputs)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the outputs, where somebody named them."""
        return () if _are_placeholders(self.outputs) else self.outputs

    @property
    def are_numbers(self) -> bool:
        """Whether the model learnt numbers, so that only their order tells what they mean."""
        return not self.names or self.names == number_names(self.count)


def get_model_classes(config: Any) -> ModelClasses:
    """The classes of a fine-tuned classifier, by its configuration."""
    outputs = get_output_names(config)
    architectures = getattr(config, "architectures", None) or ()
    is_classifier = any("Classification" in name for name in architectures)
    if _are_placeholders(outputs) and not is_classifier:
        return ModelClasses()
    kind = getattr(config, "problem_type", None)
    return ModelClasses(outputs=outputs, problem_type=REGRESSION if len(outputs) == 1 else kind)


def get_output_names(config: Any) -> tuple[str, ...]:
    """A name for each output of a classifier, placeholders too."""
    by_id = getattr(config, "id2label", None) or {}
    return tuple(str(by_id[key]) for key in sorted(by_id))


def number_names(count: int) -> tuple[str, ...]:
    """Names for classes that the data only numbers."""
    return tuple(str(index) for index in range(count))


def _are_placeholders(names: Sequence[str]) -> bool:
    return all(name == f"LABEL_{index}" for index, name in enumerate(names))
