"""Answer rows with a task's model: group by group, in the order of the rows, each exactly once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.engine import RapidformerEngine
from rapidformer.engine.evaluation import cut_into_groups, predict_in_groups
from rapidformer.models.location import (
    get_model_location,
    is_checkpoint_model,
    is_from_scratch,
)
from rapidformer.tasks.base import PreparedData, Task
from rapidformer.tasks.evaluation.progress import show_progress
from rapidformer.tasks.registry import get_task

Row = dict[str, Any] | str
Answer = dict[str, Any]


def predict_task(engine: RapidformerEngine, rows: Sequence[Row]) -> list[Answer]:
    """A model's answers to rows without labels, in order, next to the rows' own columns."""
    return [answer for group in iterate_predictions(engine, rows) for answer in group]


def iterate_predictions(
    engine: RapidformerEngine, rows: Sequence[Row], *, start: int = 0
) -> Iterator[list[Answer]]:
    """As ``predict_task``, group by group as they are done.

    ``start`` is the first row of a group; those before it are left out.
    """
    args = engine.args
    task = get_task(args.task or "")
    prepared = task.prepare_for_prediction(args, rows)
    if args.stream and engine.is_main:
        prepared = _with_streamer(prepared, rows, args)
    model = compose_task_model(engine, task, prepared)
    features = prepared.test
    assert features is not None
    size = get_batch_size(engine)
    ends = list(accumulate(cut_into_groups(len(rows) - start, size), initial=start))
    counts = task.count_features(prepared) or [1] * len(rows)
    wanted = args.progress if engine.is_main and not args.stream else False
    if wanted is None and args.output is None and sys.stdout.isatty():
        wanted = False  # the terminal shows the answers
    done = sum(counts[:start])
    with show_progress(len(features), "predicting", wanted=wanted, done=done) as advance:
        groups = predict_in_groups(
            engine.data,
            engine.model,
            features,
            lambda batch: task.evaluate_step(model, batch, prepared),
            prepared.collate,
            batch_size=size,
            lengths=None if args.stream else _measure(features),
            seed=args.seed if args.do_sample else None,
            sizes=[sum(counts[first:last]) for first, last in pairwise(ends)],
            start=done,
            advance=advance,
        )
        for (first, last), records in zip(pairwise(ends), groups, strict=True):
            answers = task.predictions(records, task.take_rows(prepared, first, last), "test")
            asked = (rows[number] for number in range(first, last))
            yield [_join(row, answer, task) for row, answer in zip(asked, answers, strict=True)]


def get_batch_size(engine: RapidformerEngine) -> int:
    """Rows per batch and rank: one, if answers are printed while they are generated."""
    return 1 if engine.args.stream else engine.data.get_prediction_batch_size()


def _with_streamer(prepared: PreparedData, rows: Sequence[Row], args: Settings) -> PreparedData:
    """The same data, whose answers are printed while they are generated."""
    from rapidformer.tasks.evaluation.streaming import AnswerStreamer

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
    return [_count_tokens(feature["input_ids"]) for feature in features]


def _count_tokens(ids: Any) -> int:
    """A row of several texts (multiple choice) is as long as the longest of them."""
    if len(ids) and isinstance(ids[0], (list, tuple)):
        return max(len(each) for each in ids)
    return len(ids)


def _join(row: Row, answer: Answer, task: Task) -> Answer:
    """A row's columns, including ids and gold labels, and the model's answers.

    An answer with the same name as a column is called ``predicted_...``.
    """
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
