"""Compare the names and shapes of saved weights with a model's, and say what differs.

Thousands of names become a few lines: numbered layers are joined, as in
``model.layers.{0-31}.mlp.up_proj.weight``. transformers itself only reports: a file with none of
the model's names gives a random model. Here a new head is fine, a foreign model is not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rapidformer.errors import ModelError
from rapidformer.log import warn
from rapidformer.nearest import find_nearest

Shape = tuple[int, ...]
_SHOWN = 12
_MOST_HINTS = 5
_MOST_COMPARED = 200
# Some classes of a family have it and others do not, with the same trunk.
_OPTIONAL = "pooler"


@dataclass(frozen=True, kw_only=True)
class NameDifferences:
    """Weights that do not match; empty if all do."""

    missing: Mapping[str, Shape | None] = field(default_factory=dict)
    """In the model only, with the shapes there if they are known."""
    unexpected: Mapping[str, Shape | None] = field(default_factory=dict)
    """In the file only."""
    misshapen: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    """In both: the shape in the file, and the one in the model."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen)

    def describe(self) -> str:
        """One indented line for each kind, and hints."""
        by_shapes: dict[tuple[Shape, Shape], list[str]] = defaultdict(list)
        for name, shapes in self.misshapen.items():
            by_shapes[shapes].append(name)
        misshapen = [
            f"{name} (saved {list(saved)}, needed {list(needed)})"
            for (saved, needed), names in by_shapes.items()
            for name in _join_numbered(names)
        ]
        lines = []
        for title, shown, count in (
            ("missing", _join_numbered(self.missing), len(self.missing)),
            ("unexpected", _join_numbered(self.unexpected), len(self.unexpected)),
            ("wrong shape", misshapen, len(self.misshapen)),
        ):
            rest = f", and {len(shown) - _SHOWN} more" if shown[_SHOWN:] else ""
            lines += [f"{title} ({count}): {', '.join(shown[:_SHOWN])}{rest}"] if shown else []
        lines += _suggest(self.missing, self.unexpected)
        return "".join(f"\n  {line}" for line in lines)


def compare_names(saved: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> NameDifferences:
    """What a file lacks, what it has besides, and what has another shape than the model's."""
    return NameDifferences(
        missing={name: shape for name, shape in wanted.items() if name not in saved},
        unexpected={name: shape for name, shape in saved.items() if name not in wanted},
        misshapen={
            name: (saved[name], shape)
            for name, shape in wanted.items()
            if name in saved and saved[name] != shape
        },
    )


def _join_numbered(names: Iterable[str]) -> list[str]:
    """The same names, with those that differ in one number joined: ``layers.{0-3,5}.weight``."""
    rows = [tuple(name.split(".")) for name in names]
    # From the last number to the first: of experts in layers, the experts are joined first.
    for place in reversed(range(max(map(len, rows), default=0))):
        groups: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            is_number = place < len(row) and row[place].isascii() and row[place].isdecimal()
            key = (*row[:place], "", *row[place + 1 :]) if is_number else row
            groups.setdefault(key, []).append(row[place] if is_number else "")
        rows = [
            (*key[:place], _join_numbers(texts), *key[place + 1 :]) if texts[0] else key
            for key, texts in groups.items()
        ]
    return [".".join(row) for row in rows]


def _join_numbers(texts: list[str]) -> str:
    numbers = sorted({int(text) for text in texts})
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    joined = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return joined if len(numbers) == 1 else f"{{{joined}}}"


# ---- hints ---------------------------------------------------------------------------------------


def _suggest(
    missing: Mapping[str, Shape | None], unexpected: Mapping[str, Shape | None]
) -> Iterator[str]:
    """What the missing weights may be called in the file, if their shapes agree."""
    prefix = _find_prefix(missing, unexpected)
    if prefix is not None:
        yield prefix
        return
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    taken: set[str] = set()
    for name in list(missing)[:_MOST_COMPARED]:
        alike = {
            other
            for other in unexpected
            if _may_be_same(missing[name], unexpected[other]) and _numbers(other) == _numbers(name)
        }
        near = find_nearest(name, alike - taken)
        if near is not None:
            taken.add(near)
            pairs[_hide_numbers(name), _hide_numbers(near)].append((name, near))
    for alike_names in list(pairs.values())[:_MOST_HINTS]:
        wanted, saved = (_join_numbered(names)[0] for names in zip(*alike_names, strict=True))
        yield f"did you mean: {saved} in the file for {wanted} in the model?"


def _find_prefix(
    missing: Mapping[str, Shape | None], unexpected: Mapping[str, Shape | None]
) -> str | None:
    """One prefix that explains most of the missing names."""
    in_file: Counter[str] = Counter()
    in_model: Counter[str] = Counter()
    for names, others, counter in (
        (unexpected, missing, in_file), (missing, unexpected, in_model),
    ):  # fmt: skip
        for name in names:
            parts = name.split(".")
            for length in range(1, len(parts)):
                rest = ".".join(parts[length:])
                if rest in others and _may_be_same(names[name], others[rest]):
                    counter[".".join(parts[:length]) + "."] += 1
    for counter, owner, other in ((in_file, "file", "model"), (in_model, "model", "file")):
        for prefix, count in counter.most_common(1):
            if 2 * count > len(missing):
                return (
                    f"{count} of the {len(missing)} missing names differ only by the prefix "
                    f"{prefix!r}, which the {owner} has and the {other} has not"
                )
    return None


def _may_be_same(first: Shape | None, second: Shape | None) -> bool:
    return first is None or second is None or first == second


def _numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdecimal()]


def _hide_numbers(name: str) -> str:
    """The name without its numbers: the same for a weight of every layer."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


# ---- what from_pretrained reports ----------------------------------------------------------------


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
    """The trunk of a model of transformers: the part that its class names, or its only model."""
    prefix = getattr(model, "base_model_prefix", "")
    class_name = type(model).__name__
    if not hasattr(model, prefix) and "For" in class_name:
        # A CLIP that classifies has no text model, a Whisper no decoder; SEW-D's name is wrong.
        parts = [n for n, part in model.named_children() if hasattr(part, "base_model_prefix")]
        prefix = parts[0] if len(parts) == 1 else "encoder"
    has_head = bool(prefix) and hasattr(model, prefix)
    return Trunk(
        class_name=class_name,
        prefix=f"{prefix}." if has_head else "",
        shapes={name: tuple(weight.shape) for name, weight in model.state_dict().items()},
    )


def check_names(
    report: dict[str, Any],
    trunk: Trunk,
    location: str,
    *,
    allows_partial: bool,
    is_whole: bool = False,
) -> None:
    """Refuse weights of another model; those of a new head are newly initialised anyway.

    With ``is_whole``, nothing that the files have may be left out, not even an old head.
    """
    differences = _find_differences(report, trunk, is_whole=is_whole)
    if not differences:
        return
    text = f"The weights in {location} do not match {trunk.class_name}"
    if not allows_partial:
        raise ModelError(
            f"{text}:{differences.describe()}\nChoose the model that they belong to, or pass "
            "--allow-partial-load to load only what matches; the rest starts from fresh values."
        )
    warn(f"{text}, and are loaded in part (--allow-partial-load):{differences.describe()}")


def _find_differences(report: dict[str, Any], trunk: Trunk, *, is_whole: bool) -> NameDifferences:
    missing = {
        name: trunk.shapes.get(name)
        for name in sorted(report.get("missing_keys", ()))
        if trunk.has(name)
    }
    misshapen = {
        name: (tuple(saved), tuple(needed))
        for name, saved, needed in sorted(report.get("mismatched_keys", ()))
        if trunk.has(name)
    }
    unexpected = sorted(report.get("unexpected_keys", ()))
    if not missing and not misshapen and not is_whole:
        # An old head is of no use here, but more of the model's own layers are a larger model.
        patterns = {_hide_numbers(name) for name in trunk.shapes if _hide_numbers(name) != name}
        unexpected = [n for n in unexpected if trunk.has(n) and _hide_numbers(n) in patterns]
    return NameDifferences(
        missing=missing, unexpected=dict.fromkeys(unexpected), misshapen=misshapen
    )
