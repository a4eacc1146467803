"""Compare the names and shapes of saved weights with a model's, and say what differs.

Thousands of names become a few lines: numbered layers are joined, as in
``model.layers.{0-31}.mlp.up_proj.weight``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rapidformer.nearest import find_nearest

Shape = tuple[int, ...]
_SHOWN = 12
_MOST_HINTS = 5
_MOST_COMPARED = 200


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
            for name in join_numbered(names)
        ]
        lines = [
            *_list("missing", join_numbered(self.missing), len(self.missing)),
            *_list("unexpected", join_numbered(self.unexpected), len(self.unexpected)),
            *_list("wrong shape", misshapen, len(self.misshapen)),
            *_suggest(self.missing, self.unexpected),
        ]
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


def join_numbered(names: Iterable[str]) -> list[str]:
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
            (*key[:place], _join_numbers(found), *key[place + 1 :]) if found[0] else key
            for key, found in groups.items()
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


def _list(title: str, shown: list[str], count: int) -> Iterator[str]:
    if shown:
        rest = f", and {len(shown) - _SHOWN} more" if shown[_SHOWN:] else ""
        yield f"{title} ({count}): {', '.join(shown[:_SHOWN])}{rest}"


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
            pairs[hide_numbers(name), hide_numbers(near)].append((name, near))
    for found in list(pairs.values())[:_MOST_HINTS]:
        wanted, saved = (join_numbered(names)[0] for names in zip(*found, strict=True))
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


def hide_numbers(name: str) -> str:
    """The name without its numbers: the same for a weight of every layer."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
