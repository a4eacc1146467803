"""Find the columns of a conversation and of its images."""

from __future__ import annotations

from typing import Any

from rapidformer.config.task_sections import DataArguments
from rapidformer.errors import DataError
from rapidformer.log import warn_once
from rapidformer.tasks.chat.columns import ChatColumns, as_optional, find_chat_columns
from rapidformer.tasks.rows.columns import find_column
from rapidformer.tasks.rows.images import IMAGES
from rapidformer.tasks.rows.rows import get_column_names
from rapidformer.tasks.text.text import TEXT


def find_image_columns(
    rows: Any, args: DataArguments, *, has_answers: bool
) -> tuple[ChatColumns, str | None]:
    """The columns of the turns, and that of the images if there is one."""
    available = get_column_names(rows)
    columns = find_chat_columns(rows, args, as_optional(TEXT), has_answers=has_answers)
    if columns is None:
        raise DataError(
            "--task image_text needs conversations (--messages-column), or prompts with answers "
            f"(--prompt-column and --response-column). The data has {', '.join(available)}."
        )
    if columns.tools is not None:
        warn_once(f"--task image_text shows no tools to the model: {columns.tools} is not read.")
    return columns, find_column(IMAGES, available, args, columns.get_names())
