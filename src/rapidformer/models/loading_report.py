"""Judge what ``from_pretrained`` reports about names: a new head is fine, a foreign model is not.

transformers itself only reports: a file with none of the model's names gives a random model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rapidformer.errors import ModelError
from rapidformer.log import warn
from rapidformer.models.weight_names import NameDifferences, Shape, hide_numbers

# Some classes of a family have it and others do not, with the same trunk.
_OPTIONAL = "pooler"


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """The part of a model that its classes for all tasks share; the rest is the head."""

    class_name: str
    prefix: str
    """Of the trunk's names; empty if the model has no head."""
    shapes: dict[str, Shape]
    """Of all the model's weights."""

    def has(self, name: str) -> bool:
        """Whether a weight belongs to the trunk, and every class of the family has it."""
        return name.startswith(self.prefix) and _OPTIONAL not in name.split(".")


def find_trunk(model: Any) -> Trunk:
    """The trunk of a model of transformers, by the name that its class says."""
    prefix = getattr(model, "base_model_prefix", "")
    has_head = bool(prefix) and hasattr(model, prefix)
    return Trunk(
        class_name=type(model).__name__,
        prefix=f"{prefix}." if has_head else "",
        shapes={name: tuple(weight.shape) for name, weight in model.state_dict().items()},
    )


def check_names(
    report: dict[str, Any], trunk: Trunk, location: str, *, allows_partial: bool
) -> None:
    """Refuse weights of another model; those of a new head are newly initialised anyway."""
    differences = _find_differences(report, trunk)
    if not differences:
        return
    text = f"The weights in {location} do not match {trunk.class_name}"
    if not allows_partial:
        raise ModelError(
            f"{text}:{differences.describe()}\nChoose the model that they belong to, or pass "
            "--allow-partial-load to load only what matches; the rest starts from fresh values."
        )
    warn(f"{text}, and are loaded in part (--allow-partial-load):{differences.describe()}")


def _find_differences(report: dict[str, Any], trunk: Trunk) -> NameDifferences:
    missing = {
        name: trunk.shapes.get(name)
        for name in sorted(report.get("missing_keys", ()))
        if trunk.has(name)
    }
    misshapen = {
        str(entry[0]): (tuple(entry[1]), tuple(entry[2]))
        for entry in sorted(report.get("mismatched_keys", ()))
        if not isinstance(entry, str) and trunk.has(str(entry[0]))
    }
    unexpected = sorted(report.get("unexpected_keys", ()))
    if not missing and not misshapen:
        # An old head is of no use here, but more of the model's own layers are a larger model.
        unexpected = _keep_layers(unexpected, trunk)
    return NameDifferences(
        missing=missing, unexpected=dict.fromkeys(unexpected), misshapen=misshapen
    )


def _keep_layers(names: Iterable[str], trunk: Trunk) -> list[str]:
    patterns = {hide_numbers(name) for name in trunk.shapes if hide_numbers(name) != name}
    return [name for name in names if trunk.has(name) and hide_numbers(name) in patterns]
