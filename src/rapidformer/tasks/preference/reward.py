"""Learn to score answers: a reward model, a classifier with one output that reads the last token.

transformers scores the last token that is not the padding token. If that is also the token that
ends an answer, the end is never scored; so rows are padded with another token or, if the tokenizer
has none, do not end with it. Training and any other program then score the same token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.errors import DataError
from rapidformer.tasks.base import Batch, PreparedData, Record, Tables, Task
from rapidformer.tasks.chat.columns import RESPONSE, find_chat_columns
from rapidformer.tasks.preference.examples import (
    MARGIN,
    PAIR_ROLES,
    REJECTED,
    PreferenceColumns,
    find_preference_columns,
)
from rapidformer.tasks.rows.columns import as_optional, find_column
from rapidformer.tasks.rows.rows import get_column_names
from rapidformer.tasks.text.text import TEXT, TextParts, build_text_collator, load_text_parts

if TYPE_CHECKING:
    from torch import nn

    from rapidformer.objectives import Objective
    from rapidformer.tasks.metrics.tally import Tally


class Reward(Task):
    name = "reward"
    description = "learn to score answers from pairs of a better and a worse one (reward models)"
    notes = "The score is read at the last real token; the exported model scores the same."
    columns = (
        *(REJECTED if role.name == REJECTED.name else role for role in PAIR_ROLES),
        MARGIN, as_optional(TEXT), as_optional(RESPONSE),
    )  # fmt: skip
    auto_class = "AutoModelForSequenceClassification"
    best_metric = "accuracy"
    greater_is_better = True
    metrics = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward", "loss")
    answer_keys = frozenset({"score"})
    uses_dropout = False
    streams = True

    def load_parts(self, args: Settings) -> TextParts:
        """The tokenizer pads with a token that ends no answer, if it has one."""
        parts = load_text_parts(args)
        tokenizer = parts.tokenizer
        if tokenizer.pad_token_id == tokenizer.eos_token_id:
            pads = (token for token in tokenizer.all_special_tokens if "pad" in token.lower())
            own = (None, tokenizer.eos_token)
            spare = (token for token in (tokenizer.unk_token, *pads) if token not in own)
            tokenizer.pad_token = next(spare, tokenizer.pad_token)
        return parts

    def choose_columns(self, rows: Any, args: Settings, *, has_answers: bool) -> Any:
        """Those of pairs or, to predict on, of texts, conversations, or prompts with answers."""
        if has_answers:
            return find_preference_columns(rows, args, may_be_single=False)
        names = get_column_names(rows)
        if find_column(as_optional(REJECTED), names, args) is not None:
            raise DataError(
                "predict scores answers one by one, and these rows are pairs: give texts, "
                "conversations, or prompts with answers. `rapidformer evaluate` compares pairs."
            )
        chat = find_chat_columns(rows, args, TEXT, has_answers=True)
        return chat or str(find_column(TEXT, names, args))

    def encode_tables(
        self, parts: TextParts, tables: Tables, columns: PreferenceColumns
    ) -> PreparedData:
        from rapidformer.tasks.preference.features import PairCollator, encode_tables

        stripped = parts.tokenizer.pad_token_id
        features, _, facts = encode_tables(
            parts, tables, columns, is_paired=True, cuts=False, stripped=stripped
        )
        extras = {"objective": self.build_objective(parts.args), **facts}
        head = {"num_labels": 1, "pad_token_id": stripped}
        pad = build_text_collator(parts.tokenizer, side="right")
        return parts.prepare(features, extras, head, collate=PairCollator(pad, ("input_ids",)))

    def encode_input(self, parts: TextParts, table: list[Record], columns: Any) -> PreparedData:
        from rapidformer.tasks.preference.features import encode_answers

        features = encode_answers(table, columns, parts)
        return parts.prepare_input(features, {"rows": {"test": table}}, side="right")

    def build_objective(self, args: Settings) -> Objective:
        from rapidformer.tasks.preference.objective import RewardObjective

        return RewardObjective(args.center_rewards_coefficient)

    def evaluate_step(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        if "objective" not in prepared.extras:
            scores = model(**batch).logits.float().squeeze(-1).tolist()
            return [{"score": score} for score in scores]
        scores, rewards = prepared.extras["objective"].score(model, batch)
        return [
            {**row, "rewards": pair}
            for row, pair in zip(scores.to_records(), rewards.view(-1, 2).tolist(), strict=True)
        ]

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        from rapidformer.tasks.preference.metrics import RewardTally

        return RewardTally()

    def answer_row(self, record: Record, prepared: PreparedData, split: str, number: int) -> Record:
        rows = prepared.extras.get("rows", {}).get(split)
        return {**(rows[number] if rows else {}), **record}
