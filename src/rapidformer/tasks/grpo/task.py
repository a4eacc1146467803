"""The task ``grpo``: prompts and reward functions instead of answers to learn.

The model itself draws the answers, on the GPUs that train it. That is honest up to a few billion
parameters on one GPU or data parallel; larger models need an inference server, which this task does
not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.config.objective_sections import GrpoArguments
from rapidformer.errors import DataError, RapidformerError
from rapidformer.tasks.base import Batch, PreparedData, Record, Tables
from rapidformer.tasks.causal_lm import CausalLM, check_is_causal
from rapidformer.tasks.chat.columns import (
    CONTEXT,
    MESSAGES,
    PROMPT,
    SYSTEM,
    TOOLS,
    ChatColumns,
    holds_turns,
)
from rapidformer.tasks.evaluation.generating import divide_length
from rapidformer.tasks.grpo.rewards import (
    RewardFunction,
    add_up,
    load_reward_functions,
    read_answers,
    score,
)
from rapidformer.tasks.metrics.tally import MeanTally, Tally
from rapidformer.tasks.rows.columns import as_optional
from rapidformer.tasks.rows.rows import get_column_names
from rapidformer.tasks.text.text import (
    TEXT,
    TextParts,
    build_text_collator,
    get_context_length,
    load_text_parts,
)

if TYPE_CHECKING:
    from torch import nn

    from rapidformer.objectives import Objective

_DEFAULT_NEW_TOKENS = 256


class Grpo(CausalLM):
    name = "grpo"
    description = "learn from a reward function that scores the model's own answers to prompts"
    notes = (
        "Micro-batches count prompts: each has `--num-generations` answers. The model's dropout is "
        "off. `eval_reward` is that of the most likely answer."
    )
    columns = (as_optional(TEXT), MESSAGES, as_optional(PROMPT), CONTEXT, SYSTEM, TOOLS)
    best_metric, greater_is_better = "reward", True
    metrics = ("reward", "mean_length")
    uses_dropout = False  # with it, answers would be those of another model
    streams = False

    def __init__(self, functions: Sequence[RewardFunction] | None = None) -> None:
        """With functions of a script, or else those of ``--reward-function``."""
        self._functions = functions

    def _get_functions(self, args: GrpoArguments) -> Sequence[RewardFunction]:
        return load_reward_functions(args) if self._functions is None else self._functions

    def find_problems(self, args: Settings) -> Iterator[str]:
        try:
            self._get_functions(args)
        except RapidformerError as error:
            yield str(error)

    def check_head(self, rows: list[Record], args: Settings, *, has_answers: bool) -> None:
        super().check_head(rows, args, has_answers=has_answers)
        if has_answers and not any(self.find_problems(args)):
            for function in self._get_functions(args):
                function.check(get_column_names(rows))

    def choose_columns(self, rows: Any, args: Settings, *, has_answers: bool) -> Any:
        """The columns of the prompts, which may be texts or messages."""
        columns = super().choose_columns(rows, args, has_answers=False)
        if isinstance(columns, str) or not (has_answers and columns.prompt):
            return columns
        if not holds_turns(rows, columns.prompt):
            return columns
        return ChatColumns(messages=columns.prompt, tools=columns.tools)

    def prepare(self, args: Settings, splits: Mapping[str, Any] | None = None) -> PreparedData:
        self._get_functions(args)  # before anything slow
        return super().prepare(args, splits)

    def encode_tables(self, parts: TextParts, tables: Tables, columns: Any) -> PreparedData:
        args = parts.args
        functions = self._get_functions(args)
        check_is_causal(parts.config, args)
        room, new_tokens = _divide_length(args, parts.tokenizer, parts.config)
        features, stop_id = {}, None
        for split, table in tables.items():
            rows = [dict(row) for row in table]
            for function in functions:
                function.check(get_column_names(rows))
            columns = self.choose_columns(rows, args, has_answers=True)  # a split's own
            features[split], stop_id = encode_prompts(
                rows, split, columns, parts.tokenizer, room, args
            )
        extras = {
            "functions": functions, "new_tokens": new_tokens, "stop_id": stop_id,
        }  # fmt: skip
        collate = PromptCollator(build_text_collator(parts.tokenizer, side="left"))
        return parts.prepare(features, extras, collate=collate)

    def build_objective(self, args: Settings) -> Objective:
        parts = load_text_parts(args, allows_towers=True)
        return self.build(args, parts.tokenizer, parts.config)

    def build(self, args: Settings, tokenizer: Any, config: Any) -> Objective:
        """The objective of a model with this tokenizer and configuration."""
        from rapidformer.tasks.grpo.objective import GrpoLoss, GrpoObjective
        from rapidformer.tasks.grpo.rollouts import Rollouts, Sampling

        _, new_tokens = _divide_length(args, tokenizer, config)
        sampling = Sampling(
            max_new_tokens=new_tokens, temperature=args.temperature or 1.0, top_k=args.top_k,
            top_p=args.top_p, min_p=args.min_p,
        )  # fmt: skip
        rollouts = Rollouts(
            sampling, self._get_functions(args), tokenizer, size=args.num_generations,
            scale=args.scale_rewards, keeps=args.updates_per_generation > 1,
            show_every=int(args.log_interval) if args.log_interval >= 1 else 10,
        )  # fmt: skip
        loss = GrpoLoss(
            kind=args.loss or "dapo", epsilon=args.clip_epsilon,
            epsilon_high=args.clip_epsilon_high, beta=args.beta or 0.0,
            corrects_kl=args.kl_correction, max_tokens=new_tokens,
        )  # fmt: skip
        return GrpoObjective(loss, rollouts, sampling.temperature)

    def score(self, model: nn.Module, batch: Batch, prepared: PreparedData) -> list[Record]:
        from rapidformer.tasks.grpo.rollouts import generate_whole

        functions, tokenizer = prepared.extras["functions"], prepared.processor
        drawn = generate_whole(model, batch, tokenizer, prepared.extras["new_tokens"])
        pairs = zip(drawn, batch["rows"], strict=True)
        answers = [a for ids, row in pairs for a in read_answers([ids], row, tokenizer)]
        try:
            rewards = [add_up(values, functions) for values in score(functions, answers)]
        except DataError as error:  # the tally raises it, on every rank
            return [{"loss": 0.0, "count": 0, "problem": str(error)}] * len(drawn)
        return [
            {"loss": 0.0, "count": 0, "shown": {"reward": reward, "mean_length": len(ids)}}
            for reward, ids in zip(rewards, drawn, strict=True)
        ]

    def build_tally(self, prepared: PreparedData, split: str) -> Tally:
        return RewardTally()


class RewardTally(MeanTally):
    """The mean reward and length of answers; there is no loss."""

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        problem = next((r["problem"] for r in records if "problem" in r), None)
        if problem is not None:
            raise DataError(problem)
        super().add(records)

    def compute(self) -> dict[str, float]:
        return self.score()


class PromptCollator:
    """Prompts padded on the left, with their rows and the seeds of their answers."""

    def __init__(self, pad: Any) -> None:
        self.pad = pad

    def __call__(self, items: list[Any]) -> Batch:
        from rapidformer.data.random_numbers import get_sample_seeds

        batch: Batch = self.pad([{"input_ids": item["input_ids"]} for item in items])
        rows: Any = [item["row"] for item in items]
        seeds: Any = list(get_sample_seeds(len(items)))
        return {**batch, "rows": rows, "seeds": seeds}


def _divide_length(args: Settings, tokenizer: Any, config: Any) -> tuple[int, int]:
    limit = args.seq_length or get_context_length(tokenizer, config)
    return divide_length(limit, args, _DEFAULT_NEW_TOKENS)


def encode_prompts(
    rows: list[dict[str, Any]], split: str, columns: ChatColumns | str, tokenizer: Any,
    length: int, args: Settings,
) -> tuple[list[Any], int | None]:  # fmt: skip
    """Items of prompts with what their reward functions get, and the token that ends a turn."""
    from rapidformer.tasks.chat.prompts import encode_beginnings, encode_questions

    if isinstance(columns, str):
        name = columns
        features, extras = encode_beginnings(rows, name, tokenizer, length, args)
        prompts = [row[name] for row in rows]
    else:
        name = str(columns.messages or columns.prompt)
        features, extras = encode_questions(rows, columns, tokenizer, length, args, split)
        prompts = [shown[name] for shown in extras["shown"]]
    names = get_column_names(rows)
    items: list[dict[str, Any]] = []
    for number, (feature, row, prompt) in enumerate(zip(features, rows, prompts, strict=True), 1):
        others = {column: row.get(column) for column in names if column != name}
        facts = {"prompt": prompt, "columns": others, "place": f"{split}, row {number}"}
        items.append({"input_ids": list(feature["input_ids"]), "row": facts})
    return items, extras.get("stop_id")
