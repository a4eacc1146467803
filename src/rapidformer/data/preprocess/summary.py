"""What a run made, and how it is reported at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rapidformer.data.preprocess.inputs import Source
from rapidformer.data.preprocess.parts import FIRST_SHOWN, KeyCounts, Problem, ProblemLog


@dataclass(frozen=True)
class Summary:
    """The result of `preprocess`."""

    outputs: dict[str, Path]  # key -> prefix of its files
    counts: dict[str, KeyCounts]
    problems: ProblemLog
    sources: list[Source]
    dtype: str
    text_bytes: int
    made_bytes: int  # of the text, what this run itself did
    seconds: float
    workers: int
    parts: int
    reused_parts: int


def format_summary(summary: Summary) -> str:
    """A few lines for the user."""
    lines: list[str] = []
    for key, prefix in summary.outputs.items():
        counts = summary.counts[key]
        files = [Path(f"{prefix}{ending}") for ending in (".bin", ".idx")]
        sizes = [file.stat().st_size for file in files]
        lines += [
            f"{prefix}",
            f"  documents  {counts.documents:,}",
            f"  sequences  {counts.sequences:,}",
            f"  tokens     {counts.tokens:,} ({summary.dtype})",
            f"  bytes      {sum(sizes):,} ("
            + ", ".join(f"{f.name} {size:,}" for f, size in zip(files, sizes, strict=True))
            + ")",
        ]
        if counts.empty:
            lines.append(f"  empty      {counts.empty:,} documents without any token, left out")
    lines += [_format_time(summary), *format_problems(summary.problems, summary.sources)]
    first = next(iter(summary.outputs.values()))
    lines.append(f"next: rapidformer data info {first}")
    return "\n".join(lines) + "\n"


def _format_time(summary: Summary) -> str:
    workers, files = count(summary.workers, "worker"), count(len(summary.sources), "file")
    rate = f"{summary.made_bytes / max(summary.seconds, 1e-9) / 1e6:.1f} MB/s, "
    text = (
        f"{files}, {summary.text_bytes / 1e6:,.1f} MB of input in {summary.seconds:.1f} s "
        f"({rate if summary.made_bytes else ''}{workers})"
    )
    if summary.reused_parts:
        text += f"; {summary.reused_parts} of {summary.parts} parts were there already"
    return text


def format_problems(problems: ProblemLog, sources: list[Source]) -> list[str]:
    """How many lines were skipped, why, and where the first of each kind are."""
    if not problems.count:
        return ["no line was skipped"]
    lines = [f"skipped {count(problems.count, 'line')}:"]
    for reason, problem in sorted(problems.items(), key=lambda item: -item[1].count):
        lines.append(f"  {reason}: {problem.count:,} ({_format_places(problem, sources)})")
        detail = problem.first[0][2]
        if detail:
            lines.append(f"    the first: {detail}")
    return lines


def _format_places(problem: Problem, sources: list[Source]) -> str:
    by_file: dict[int, list[str]] = {}
    for source, line, _ in problem.first:
        by_file.setdefault(source, []).append(str(line))
    text = "; ".join(
        f"{sources[source].path} {name_place(sources[source])} {', '.join(lines)}"
        for source, lines in by_file.items()
    )
    return text + (", ..." if problem.count > FIRST_SHOWN else "")


def count(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def name_place(source: Source) -> str:
    """What a document's number counts: lines of a text, rows of a table, items of a list."""
    return {"parquet": "row", "json-array": "item"}.get(source.kind, "line")
