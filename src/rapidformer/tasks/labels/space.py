"""The classes of the data, as a model learns them, and those that a model has learned.

`LABEL_0`, `LABEL_1`, ... are not names but the placeholders that transformers writes if the classes
have none; even a model without a classifier has two of them.
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
    """The labels of the data, and how its values map to them."""

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
    """The classes of a fine-tuned model; empty for a model that has no classifier yet."""

    outputs: tuple[str, ...] = ()
    problem_type: str | None = None

    @property
    def count(self) -> int:
        return len(self.outputs)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the outputs, if they have names."""
        return () if _are_placeholders(self.outputs) else self.outputs

    @property
    def are_numbers(self) -> bool:
        """Whether the model learned plain numbers, so that only the order tells classes apart."""
        return not self.names or self.names == number_names(self.count)


def get_model_classes(config: Any) -> ModelClasses:
    """The classes of a fine-tuned classifier, from its configuration."""
    outputs = get_output_names(config)
    architectures = getattr(config, "architectures", None) or ()
    is_classifier = any("Classification" in name for name in architectures)
    if _are_placeholders(outputs) and not is_classifier:
        return ModelClasses()
    kind = getattr(config, "problem_type", None)
    return ModelClasses(outputs=outputs, problem_type=REGRESSION if len(outputs) == 1 else kind)


def get_output_names(config: Any) -> tuple[str, ...]:
    """A name for each output of a classifier, including placeholders."""
    by_id = getattr(config, "id2label", None) or {}
    return tuple(str(by_id[key]) for key in sorted(by_id))


def number_names(count: int) -> tuple[str, ...]:
    """Names for classes that the data only numbers."""
    return tuple(str(index) for index in range(count))


def _are_placeholders(names: Sequence[str]) -> bool:
    return all(name == f"LABEL_{index}" for index, name in enumerate(names))
