"""Answer in conversations about images (Qwen-VL, Gemma 3, LLaVA, ...), and learn from the answers.

The model's own processor makes the batches, in the loader's processes, so no family has code here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.data.files import without_decoding
from rapidformer.errors import ConfigurationError
from rapidformer.tasks.base import Batch, PreparedData, Record, Row, Tables
from rapidformer.tasks.causal_lm import CausalLM
from rapidformer.tasks.chat.columns import CONTEXT, MESSAGES, PROMPT, RESPONSE, SYSTEM
from rapidformer.tasks.evaluation.generating import generate_records
from rapidformer.tasks.image_text.conversations import find_image_columns
from rapidformer.tasks.rows.columns import ColumnRole, as_optional
from rapidformer.tasks.rows.named_files import IMAGES
from rapidformer.tasks.rows.rows import as_rows, get_column_names, get_splits

if TYPE_CHECKING:
    from torch import nn


class ImageText(CausalLM):
    name = "image_text"
    description = (
        "answer in conversations about images, several per row or none (Qwen-VL, Gemma 3, SmolVLM, "
        "LLaVA, Mistral 3 and other models with a processor)"
    )
    notes = (
        "Only the answers are trained on. The vision tower and the projector are frozen unless "
        "--train-vision and --train-projector are given. See [Conversations about images]"
        "(image_text.md)."
    )
    columns: tuple[ColumnRole, ...] = (
        MESSAGES, as_optional(PROMPT), as_optional(RESPONSE), CONTEXT, SYSTEM, IMAGES,
    )  # fmt: skip
    auto_class = "AutoModelForImageTextToText"

    def choose_columns(self, rows: Any, args: Settings, *, has_answers: bool) -> Any:
        return find_image_columns(rows, args, has_answers=has_answers)

    def load_parts(self, args: Settings) -> Any:
        from rapidformer.tasks.image_text.preparing import load_image_parts

        return load_image_parts(args)

    def load_tables(self, parts: Any, splits: Tables | None) -> dict[str, Any]:
        tables = get_splits(parts.args, splits)
        return {
            s: without_decoding(rows, "Image", *get_column_names(rows))
            for s, rows in tables.items()
        }

    def read_input(self, rows: Sequence[Row], parts: Any) -> list[Record]:
        """The rows, with the pictures of --image if they have none of their own."""
        args = parts.args
        table, column = as_rows(rows, args.prompt_column or "prompt"), args.image_column or "images"
        if not args.image:
            return table
        if any(column in row for row in table):
            raise ConfigurationError(
                f"--image is for texts without images, and the rows have the column {column}: "
                "leave one of them out."
            )
        return [{**row, column: list(args.image)} for row in table]

    def encode_tables(self, parts: Any, tables: Tables, columns: Any) -> PreparedData:
        from rapidformer.tasks.image_text.preparing import prepare_answers

        return prepare_answers(parts, tables, *columns)

    def encode_input(self, parts: Any, table: list[Record], columns: Any) -> PreparedData:
        from rapidformer.tasks.image_text.preparing import prepare_questions

        return prepare_questions(parts, table, *columns)

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        if "generation" in prepared.extras:
            return generate_records(model, batch, prepared, inputs=batch)
        return self.score(model, batch, prepared)
