"""Answer in conversations about images (Qwen-VL, Gemma 3, LLaVA, ...), and learn from the answers.

The model's own processor makes the batches, in the loader's processes, so no family has code here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.tasks.base import Batch, PreparedData, Record, Row
from rapidformer.tasks.causal_lm import CausalLM
from rapidformer.tasks.chat.columns import CONTEXT, MESSAGES, PROMPT, RESPONSE, SYSTEM
from rapidformer.tasks.evaluation.generating import generate_records
from rapidformer.tasks.image_text.conversations import find_image_columns
from rapidformer.tasks.rows.columns import ColumnRole, as_optional
from rapidformer.tasks.rows.images import IMAGES
from rapidformer.tasks.text.text import score_blocks

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

    def check_columns(self, rows: list[Record], args: Settings, *, has_answers: bool) -> None:
        find_image_columns(rows, args, has_answers=has_answers)

    def prepare(self, args: Settings, splits: Mapping[str, Any] | None = None) -> PreparedData:
        from rapidformer.tasks.image_text.preparing import prepare_answers

        return prepare_answers(args, splits)

    def prepare_for_prediction(self, args: Settings, rows: Sequence[Row]) -> PreparedData:
        from rapidformer.tasks.image_text.preparing import prepare_questions

        return prepare_questions(args, rows)

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        from rapidformer.tasks.evaluation.scoring import shift_labels

        if prepared.extras["mode"] != "predict":
            logits = model(**self.drop_labels(batch)).logits
            return score_blocks(logits, shift_labels(batch["labels"]))
        return generate_records(model, batch, prepared, inputs=batch)
