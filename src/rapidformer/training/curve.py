"""Draw the ``metrics.jsonl`` of runs as loss curves; without pyplot, which keeps every figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.errors import DataError, MissingPackageError
from rapidformer.report.metrics import Points, is_number, read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The second panel shows the first of these metrics that the run has, otherwise its first metric.
METRICS = (
    "accuracy", "matthews_correlation", "f1", "pearson", "rougeL", "rouge_l", "bleu",
    "exact_match", "perplexity",
)  # fmt: skip
NEVER_SHOWN = ("loss", "runtime", "samples", "seconds", "per_second", "time", "memory")
FEWEST_TO_SMOOTH = 10

BLUE, ORANGE, GREEN = "#2f6db5", "#e07b28", "#2e8b57"
INK, FAINT = "#333333", "#d9d9d9"


def plot_runs(metrics_files: Sequence[Path], picture: Path) -> Path:
    """Draw the losses and the first run's main metric; the suffix selects the image format."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise MissingPackageError("matplotlib", "drawing the loss curve", extra="plot") from None
    runs = [read_lines(file) for file in metrics_files]
    for file, lines in zip(metrics_files, runs, strict=True):
        has_losses = any(_get_points(lines, key) for key in ("loss", "eval_loss"))
        if not has_losses and _find_metric(lines) is None:
            raise DataError(f"{file} has no losses yet: wait until the run reaches a log interval.")
    if picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise DataError(f"{picture}: the name of an image must end in .png, .svg or .pdf.")
    metric = _find_metric(runs[0])
    panels = 2 if metric is not None else 1
    figure = Figure(figsize=(8, 6 if panels == 2 else 4.5), layout="constrained")
    grid = figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=(3, 2)[:panels])
    axes: list[Axes] = list(grid[:, 0])
    folders = [file.resolve().parent for file in metrics_files]
    names = [folder.name or "run" for folder in folders]
    if len(set(names)) < len(names):
        names = [str(file.parent) for file in metrics_files]
    _dress(axes[0], "loss")
    if metric is not None:
        _dress(axes[1], metric.removeprefix("eval_").replace("_", " "))
    if len(runs) > 1:
        title = _draw_runs(axes, names, runs, metric)
    else:
        losses = _get_points(runs[0], "loss")
        _draw_losses(axes[0], losses, _get_points(runs[0], "eval_loss"))
        if metric is not None:
            falls = "perplexity" in metric or "error" in metric
            _draw_metric(axes[1], _get_points(runs[0], metric), rises=not falls)
        title = f"{names[0]}: step {losses[-1][0]:,.0f}" if losses else names[0]
    axes[-1].set_xlabel("step", color=INK)
    steps = {float(line["step"]) for lines in runs for line in lines}
    if len(steps) == 1:
        axes[-1].set_xlim(min(steps) - 1, min(steps) + 1)
    axes[-1].xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    figure.suptitle(title, color=INK, fontsize=12)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150, facecolor="white")
    return picture


def _draw_runs(
    axes: list[Axes], names: list[str], runs: list[list[dict[str, Any]]], metric: str | None
) -> str:
    """Training solid, evaluation dashed, a colour for each run; returns the title."""
    for number, (name, lines) in enumerate(zip(names, runs, strict=True)):
        losses, colour = _get_points(lines, "loss"), f"C{number}"
        axes[0].plot(*_columns(_smooth(losses) or losses), color=colour, linewidth=2, label=name)
        axes[0].plot(*_columns(_get_points(lines, "eval_loss")), "o--", color=colour, markersize=5)
        if metric is not None:
            axes[1].plot(*_columns(_get_points(lines, metric)), "o-", color=colour, markersize=5)
    axes[0].legend(frameon=False, labelcolor=INK, loc="best")
    return "training (solid) and evaluation (dashed)"


def _get_points(lines: list[dict[str, Any]], key: str) -> Points:
    """(step, value) of the lines that have the key, without values that are not numbers."""
    return sorted(
        (float(line["step"]), float(line[key])) for line in lines if is_number(line.get(key))
    )


def _find_metric(lines: list[dict[str, Any]]) -> str | None:
    """The key of the evaluation metric to show."""
    points = [
        key.removeprefix("eval_")
        for line in lines
        for key in line
        if key.startswith("eval_") and is_number(line[key])
    ]
    known = [name for name in METRICS if name in points]
    others = [name for name in points if not any(word in name for word in NEVER_SHOWN)]
    return next((f"eval_{name}" for name in known + others), None)


def _draw_losses(axes: Axes, losses: Points, eval_losses: Points) -> None:
    smoothed = _smooth(losses)
    if smoothed:
        axes.plot(*_columns(losses), color=BLUE, alpha=0.3, linewidth=0.9)
        axes.plot(*_columns(smoothed), color=BLUE, linewidth=2, label="training (smoothed)")
    elif losses:
        axes.plot(
            *_columns(losses), "o-", color=BLUE, linewidth=1.5, markersize=4, label="training"
        )
    if eval_losses:
        axes.plot(
            *_columns(eval_losses), "o--", color=ORANGE, linewidth=1.2, markersize=6,
            markeredgecolor="white", label="evaluation",
        )  # fmt: skip
    axes.legend(frameon=False, labelcolor=INK, loc="best")


def _draw_metric(axes: Axes, points: Points, *, rises: bool) -> None:
    axes.plot(*_columns(points), "o-", color=GREEN, linewidth=1.5, markersize=6,
              markeredgecolor="white")  # fmt: skip
    best = (max if rises else min)(points, key=lambda point: point[1])
    axes.plot(*best, "o", color=GREEN, markersize=13, markerfacecolor="none", markeredgewidth=1.5)
    # The margin makes room for the label above a single or late best point.
    axes.margins(x=0.05, y=0.3)
    axes.annotate(
        f"best {best[1]:.4g}", best, xytext=(0, 10 if rises else -18), textcoords="offset points",
        ha="center", color=GREEN, fontsize=10, annotation_clip=False,
    )  # fmt: skip


def _dress(axes: Axes, name: str) -> None:
    axes.set_ylabel(name, color=INK)
    axes.grid(True, color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=INK, labelsize=9)


def _smooth(points: Points) -> Points:
    """A centred moving average, weighted by steps; a trailing mean would lag behind."""
    if len(points) < FEWEST_TO_SMOOTH:
        return []
    steps, values = _columns(points)
    weights = [max(1.0, step - before) for before, step in zip([0.0, *steps], steps, strict=False)]
    reach = max(1, len(points) // 20)
    smoothed = []
    for place, step in enumerate(steps):
        # Narrower towards the ends, so that both sides have about the same weight.
        near = max(min(reach, place, len(points) - 1 - place), reach // 2)
        part = slice(max(0, place - near), place + near + 1)
        total = sum(w * v for w, v in zip(weights[part], values[part], strict=True))
        smoothed.append((step, total / sum(weights[part])))
    return smoothed


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
