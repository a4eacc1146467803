"""Learn which of two answers is better, or whether an answer is good: DPO and its relatives.

The reference is what the run started from, and dropout is off: policy and reference must differ by
what was learnt alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.tasks.base import Batch, PreparedData, Record, Tables
from rapidformer.tasks.causal_lm import CausalLM, check_is_causal
from rapidformer.tasks.preference.examples import ANSWER, LABEL, PAIR_ROLES, find_preference_columns
from rapidformer.tasks.rows.rows import to_rows
from rapidformer.tasks.text.text import TextParts, build_text_collator

if TYPE_CHECKING:
    from torch import nn

    from rapidformer.objectives import Objective
    from rapidformer.tasks.metrics.tally import Tally


class Preference(CausalLM):
    name = "preference"
    description = (
        "learn which of two answers is better (DPO, IPO, SimPO, ORPO, ...) or whether an answer "
        "is good (KTO)"
    )
    notes = (
        "Every loss is a mean over the pairs of the global batch; KTO's baseline is that of the "
        "global batch, too. ORPO's likelihood is that of prompt and chosen answer, per token."
    )
    columns = (*PAIR_ROLES, ANSWER, LABEL)
    best_metric = "loss"
    metrics = (
        "loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
        "logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "entropy",
        "mean_token_accuracy", "sft_loss", "nll_loss", "log_odds_ratio",
        "log_odds_chosen", "kl",
    )  # fmt: skip
    smooths_labels = False
    uses_dropout = False
    reads_as = ("causal_lm",)

    def choose_columns(self, rows: Any, args: Settings, *, has_answers: bool) -> Any:
        if has_answers:
            return find_preference_columns(rows, args, may_be_single=args.loss == "kto")
        return super().choose_columns(rows, args, has_answers=False)

    def encode_tables(self, parts: TextParts, tables: Tables, columns: Any) -> PreparedData:
        from rapidformer.tasks.preference.features import (
            AnswerCollator,
            PairCollator,
            RotatedRows,
            check_balance,
            encode_tables,
        )
        from rapidformer.tasks.preference.losses import LossSettings

        args = parts.args
        check_is_causal(parts.config, args)
        is_paired = args.loss != "kto"
        features, encoder, facts = encode_tables(parts, tables, columns, is_paired=is_paired)
        extras = {
            "stop_id": encoder.chat.get_stop_id(),
            "objective": self.build_objective(args), **facts,
        }  # fmt: skip
        pad = build_text_collator(parts.tokenizer, side="right")
        if is_paired:
            collate: Any = PairCollator(pad, ("input_ids", "labels"))
            return parts.prepare(features, extras, collate=collate)
        if features.get("train") is not None:
            check_balance(features["train"], LossSettings.read(args))
        for split, rows in features.items():
            # An evaluation compares prompts with the answers before them in the split.
            if rows is not None and split != "train":
                features[split] = RotatedRows(rows, parts.length)
        return parts.prepare(features, extras, collate=AnswerCollator(pad))

    def build_objective(self, args: Settings) -> Objective:
        from rapidformer.tasks.preference.losses import LossSettings
        from rapidformer.tasks.preference.objective import KTOObjective, PairObjective

        settings = LossSettings.read(args)
        if settings.name == "kto":
            return KTOObjective(settings, args.seq_length)
        return PairObjective(settings)

    def score(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        from rapidformer.objectives import Context
        from rapidformer.tasks.preference.objective import KTOObjective

        objective = prepared.extras["objective"]
        context = prepared.extras.get("context", Context())
        if isinstance(objective, KTOObjective):
            ratios, logps, sums = objective.score(model, batch, context)
            others = objective.score_others(model, batch, context)
            columns = {
                "ratio": ratios, "logp": logps, "other": others,
                "is_good": batch["desirable"].bool(), **sums._asdict(),
            }  # fmt: skip
            rows = to_rows({name: values.tolist() for name, values in columns.items()})
            return [{**row, "loss": 0.0, "count": 1} for row in rows]
        return objective.score(model, batch, context).to_records()

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        from rapidformer.tasks.preference.metrics import AnswerTally, PairTally
        from rapidformer.tasks.preference.objective import KTOObjective

        objective = prepared.extras["objective"]
        if isinstance(objective, KTOObjective):
            return AnswerTally(objective.settings.beta, objective.sum_losses)
        return PairTally(objective.combine)
