"""Report a comparison: a table, and the conclusion."""

from __future__ import annotations

from rapidformer.verification.compare import Comparison

_HEADINGS = ("quantity", "worst difference", "limit", "", "where")


def format_table(comparison: Comparison) -> list[str]:
    """One line per quantity: the worst relative difference, its limit, and where it occurred."""
    rows = [_HEADINGS]
    for quantity in comparison.quantities.values():
        worst = quantity.worst
        rows.append(
            (
                quantity.name,
                f"{worst.value:.1e}" if worst.value else "0",
                f"{worst.limit:.0e}",
                "pass" if quantity.is_equal else "FAIL",
                worst.locate() if worst.value else "",
            )
        )
    rows += [("parameters", "", "", "FAIL", problem) for problem in comparison.problems]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS) - 1)]
    return [
        "  ".join(
            [*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    ]


def describe_cause(comparison: Comparison) -> list[str]:
    """What is wrong, in sentences; then the parameter that differs first, unless that explains it.

    A wrong rate or decay makes every later gradient differ, so only a first one says more.
    """
    first = comparison.first
    if comparison.causes and (first is None or first.update != 0):
        return comparison.causes
    return [*comparison.causes, describe_first(comparison)]


def describe_first(comparison: Comparison) -> str:
    """The parameter nearest to the cause, and by how much it differs."""
    first = comparison.first
    if first is None:
        return ""
    where = {None: "", "": "the outputs of all blocks are right, the loss is not; "}
    begins = where.get(comparison.block, f"the forward pass differs from {comparison.block} on; ")
    what = "weight" if first.update is None else "gradient"
    others = comparison.differing - 1
    more = f"; so do {others} of the other {comparison.parameters - 1}" if others else ", alone"
    return (
        f"{begins}first parameter that differs: {first.name}, its {what} by {first.value:.1e} "
        f"({'' if first.update is None else f'step {first.update + 1}, '}"
        f"rank {first.process}){more}"
    )
