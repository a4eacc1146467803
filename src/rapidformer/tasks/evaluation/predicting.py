"""Answer rows with a task's model: group by group, in the order of the rows, each exactly once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from transformers import TextStreamer

from rapidformer.config.task_sections import GenerationArguments
from rapidformer.engine import RapidformerEngine
from rapidformer.engine.evaluation import cut_into_groups, predict_in_groups
from rapidformer.log import get_logger
from rapidformer.models.location import get_model_location, is_checkpoint_model, is_from_scratch
from rapidformer.tasks.base import Answers, PreparedData, Row, Task
from rapidformer.tasks.evaluation.generating import cut_at_stops
from rapidformer.tasks.registry import get_task
from rapidformer.training.garbage import GarbageCollection

_ROWS_AT_ONCE = 64
"""Rows per batch and rank, unless the settings say how many."""


def predict_task(engine: RapidformerEngine, rows: Sequence[Row]) -> Answers:
    """A model's answers to rows without labels, in order, next to the rows' own columns."""
    return [answer for group in iterate_predictions(engine, rows) for answer in group]


def iterate_predictions(
    engine: RapidformerEngine, rows: Sequence[Row], *, start: int = 0
) -> Iterator[Answers]:
    """As ``predict_task``, group by group; rows before ``start``, a group's first, are left out."""
    size = get_batch_size(engine)
    garbage = GarbageCollection(len(rows) // size)
    with garbage:
        yield from _iterate(engine, rows, start, size, garbage)


def _iterate(
    engine: RapidformerEngine, rows: Sequence[Row], start: int, size: int,
    garbage: GarbageCollection,
) -> Iterator[Answers]:  # fmt: skip
    args = engine.args
    task = get_task(args.task or "")
    with garbage.held_back():
        prepared = task.prepare_for_prediction(args, rows)
    if args.stream and engine.is_main:
        prepared = _with_streamer(prepared, rows, args)
    model = compose_task_model(engine, task, prepared)
    features = prepared.test
    assert features is not None
    ends = list(accumulate(cut_into_groups(len(rows) - start, size), initial=start))
    counts = task.count_features(prepared) or [1] * len(rows)
    wanted = args.progress if engine.is_main and not args.stream else False
    if wanted is None and args.output is None and sys.stdout.isatty():
        wanted = False  # the terminal shows the answers
    done = sum(counts[:start])
    with show_progress(len(features), "predicting", wanted=wanted, done=done) as advance:
        groups = predict_in_groups(
            engine.data, engine.model, features,
            lambda batch: task.evaluate_step(model, batch, prepared), prepared.collate,
            batch_size=size, lengths=None if args.stream else _measure(features),
            seed=args.seed if args.do_sample else None,
            sizes=[sum(counts[first:last]) for first, last in pairwise(ends)],
            start=done, advance=advance,
        )  # fmt: skip
        for (first, last), records in zip(pairwise(ends), groups, strict=True):
            answers = task.predictions(records, prepared, "test", first)
            asked = (rows[number] for number in range(first, last))
            yield [_join(row, answer, task) for row, answer in zip(asked, answers, strict=True)]


def get_batch_size(engine: RapidformerEngine) -> int:
    """Rows per batch and rank: one, if answers are printed while they are generated."""
    args, sizes = engine.args, ("micro_batch_size", "global_batch_size", "eval_micro_batch_size")
    if args.stream:
        return 1
    # Without gradients, many rows fit.
    asked = None if any(map(args.is_given, sizes)) else _ROWS_AT_ONCE
    return engine.data.get_prediction_batch_size(asked)


def _with_streamer(
    prepared: PreparedData, rows: Sequence[Row], args: GenerationArguments
) -> PreparedData:
    """The same data, whose answers are printed while they are generated."""
    titles = [row if isinstance(row, str) else str(row) for row in rows] if len(rows) > 1 else []
    streamer = AnswerStreamer(prepared.processor, args.stop_strings or (), titles)
    return replace(prepared, extras={**prepared.extras, "streamer": streamer})


def compose_task_model(engine: RapidformerEngine, task: Task, prepared: PreparedData) -> Any:
    """The task's model with its switches, ready for evaluation and prediction."""
    must_be_trained = not (engine.args.allow_untrained or is_from_scratch(engine.args))
    built = task.build_model(engine.args, prepared, must_be_trained=must_be_trained)
    model = engine.model.compose_for_evaluation(built)
    location = Path(get_model_location(engine.args) or "")
    if is_checkpoint_model(location):
        engine.checkpoints.load_weights(location.parent)
    return model


def _measure(features: Any) -> list[int] | None:
    """Tokens per feature; None for images, which are all of one size."""
    if not isinstance(features, list):
        return None
    # A row of several texts (multiple choice) is as long as the longest of them.
    rows = (feature["input_ids"] for feature in features)
    return [max(map(len, ids)) if ids and isinstance(ids[0], list) else len(ids) for ids in rows]


def _join(row: Row, answer: dict[str, Any], task: Task) -> dict[str, Any]:
    """A row's columns and the answers; one with a column's name is called ``predicted_...``."""
    if isinstance(row, str):
        return answer
    joined = {name: value for name, value in row.items() if fits_json(value)}
    for name, value in answer.items():
        if name not in row:
            joined[name] = value
        elif name in task.answer_keys:
            joined[f"predicted_{name}"] = value
        else:
            joined.setdefault(name, value)
    return joined


def fits_json(value: Any) -> bool:
    """Whether a value of the user's can be written next to the answer."""
    if isinstance(value, dict):
        return all(fits_json(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(fits_json(item) for item in value)
    return value is None or isinstance(value, (str, int, float, bool))


_LINE_SECONDS = 10.0


@contextmanager
def show_progress(
    total: int, what: str, *, wanted: bool | None, done: int = 0
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of further examples done."""
    is_terminal = sys.stderr.isatty()
    if not (is_terminal if wanted is None else wanted):
        yield (lambda count: None) if is_terminal else _log_lines(total, what, done)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        TextColumn(what), BarColumn(), MofNCompleteColumn(), Elapsed(), Remaining(),
        TextColumn("left"),
    )  # fmt: skip
    # Not redirected: what is written to stdout meanwhile must go there, to a file perhaps.
    console = Console(stderr=True)
    with Progress(*columns, console=console, redirect_stdout=False) as progress:
        task = progress.add_task(what, total=total, completed=done)

        def advance(count: int) -> None:
            nonlocal done
            # The last round may be padded to the same size on all ranks.
            done = min(done + count, total)
            progress.update(task, completed=done)

        yield advance


def _log_lines(total: int, what: str, done: int) -> Callable[[int], None]:
    """A function that logs a line at most every ten seconds; short work logs none."""
    start = last = time.monotonic()
    first = done

    def advance(count: int) -> None:
        nonlocal last, done
        done = min(done + count, total)
        now = time.monotonic()
        if now - last >= _LINE_SECONDS and first < done < total:
            last, rate = now, (done - first) / (now - start)
            left = timedelta(seconds=round((total - done) / rate))
            get_logger().info(f"{what} | {done:,} of {total:,} | {rate:,.1f}/s | {left} left")

    return advance


class AnswerStreamer(TextStreamer):
    """Prints answers word by word, except for what may be the beginning of a stop string."""

    def __init__(
        self, tokenizer: Any, stop_strings: Sequence[str] = (), titles: Sequence[str] = ()
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stop_strings = tuple(stop_strings)
        self._titles = iter(titles)
        self._held = ""
        self._is_stopped = False

    def put(self, value: Any) -> None:
        title = next(self._titles, None) if self.next_tokens_are_prompt else None
        if title is not None:
            print(f"> {title}", flush=True)
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        held = "" if self._is_stopped else self._held + text
        cut = cut_at_stops(held, self._stop_strings)
        self._is_stopped |= len(cut) < len(held)
        held, is_sure = cut, stream_end or self._is_stopped
        room = 0 if is_sure else max(map(len, self._stop_strings), default=1) - 1
        ready, self._held = held[: len(held) - room], held[len(held) - room :]
        print(ready, flush=True, end="\n" if stream_end else "")
        if stream_end:
            self._held, self._is_stopped = "", False
