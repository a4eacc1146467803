"""Prompts and answers of ``Trainer.predict`` in MindFormers' shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rapidformer.errors import DataError

Row = dict[str, Any] | str


def read_prompts(given: Any) -> list[Row]:
    """A text, a file with a text per line, a list of texts, or a data set's rows."""
    if given is None:
        raise DataError("Trainer.predict() needs input_data: a text, a list of texts or a file.")
    if isinstance(given, Path) or (isinstance(given, str) and _is_file(given)):
        lines = Path(given).read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.strip()]
    if isinstance(given, (str, dict)):
        return [given]
    rows = list(given)
    if not rows:
        raise DataError("Trainer.predict(): input_data is empty.")
    return rows


def rename_answers(task: str, rows: list[Row], answers: list[dict[str, Any]]) -> list[Any]:
    """What the task of ours says, under the keys of MindFormers' pipelines."""
    if task == "text_generation":
        return [
            {"text_generation_text": [_get_prompt(row) + text for text in _list_texts(answer)]}
            for row, answer in zip(rows, answers, strict=True)
        ]
    if task == "translation":
        return [{"translation_text": _list_texts(answer)} for answer in answers]
    if task in ("text_classification", "image_classification"):
        return [[{"label": each["label"], "score": each["score"]}] for each in answers]
    return answers


def _list_texts(answer: dict[str, Any]) -> list[str]:
    """One text, or ``num_return_sequences`` of them."""
    found = answer["generated"]
    return found if isinstance(found, list) else [found]


def _get_prompt(row: Row) -> str:
    return row if isinstance(row, str) else ""


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # a long text is no file name
        return False
