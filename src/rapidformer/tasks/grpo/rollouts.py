"""From an update of prompts to an update of scored answers.

Every prompt gets a group of answers, which stay in one micro-batch. An answer depends on the
sample, its place in the group and the weights alone, and so do its reward and its advantage: ranks
and micro-batches change nothing. If several updates learn from the same answers, these are kept
with their log-probabilities, by sample, and are part of every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rapidformer.data.batch import describe_batch
from rapidformer.data.random_numbers import SampleSeed
from rapidformer.data.update import MicroBatch, Update, move_micro_batch
from rapidformer.dist.collectives import gather_objects
from rapidformer.dist.topology import Topology
from rapidformer.errors import DataError
from rapidformer.log import get_logger
from rapidformer.tasks.base import IGNORED_LABEL, Batch
from rapidformer.tasks.evaluation.generating import Generation, generate, get_end_ids
from rapidformer.tasks.grpo.rewards import RewardFunction, add_up, read_answers, score, shorten
from rapidformer.tasks.text.text import build_text_collator

STATISTICS = "statistics"
"""Key of a batch: numbers of its update that are shown."""
_SHOWN_LETTERS = 100
LogProbs = Callable[[Any, Batch], Tensor]


@dataclass
class Group:
    """The answers to a prompt."""

    answers: list[list[int]]
    rewards: list[list[float]] = field(default_factory=list)
    """Of each answer by each function."""
    old_logps: list[list[float]] | None = None
    """Of the answers' tokens when they were drawn; only if they are learnt from again."""


class Rollouts:
    """Draws answers, has them scored, and makes batches of them."""

    def __init__(
        self,
        sampling: Sampling,
        functions: Sequence[RewardFunction],
        tokenizer: Any,
        *,
        size: int,
        scale: str,
        keeps: bool,
        show_every: int,
    ) -> None:
        """Groups of ``size``; one that ``keeps`` its answers is asked for the same ones again."""
        self._sampling, self._functions, self._tokenizer = sampling, functions, tokenizer
        self._size, self._scale, self._keeps = size, scale, keeps
        self._show_every, self._drawn_updates = show_every, 0
        self._pad: Callable[[list[Any]], Batch] = build_text_collator(tokenizer, side="right")
        self._kept: dict[SampleSeed, Group] = {}
        self._topology: Topology | None = None
        self.statistics: list[str] = []
        """The names of what ``STATISTICS`` holds."""

    def expand(
        self,
        model: Any,
        update: Update,
        topology: Topology,
        device: torch.device,
        get_logps: LogProbs,
    ) -> Update:
        """The update with answers; ``get_logps`` is of the labels of a batch."""
        self._topology = topology
        seeds = [s for m in update if not m.is_filler for s in m.batch["seeds"]]
        if not all(seed in self._kept for seed in seeds):
            self._kept = {}  # a new generation begins
        groups = [self._draw(model, micro_batch, device) for micro_batch in update]
        self._score(update, groups, topology)
        everyone = self._gather(model, update, groups, topology)
        shown = summarize(everyone, [f.name for f in self._functions], self._size)
        self.statistics = list(shown)
        rewards = [answer.reward for answer in everyone]
        micro_batches = []
        for micro_batch, some in zip(update, groups, strict=True):
            batch = self._join(micro_batch.batch, some, rewards)
            batch[STATISTICS] = torch.tensor(list(shown.values()), dtype=torch.float32)
            info = describe_batch(batch)
            info = info.as_filler() if micro_batch.is_filler else info
            made = move_micro_batch(micro_batch._replace(batch=batch, info=info), device)
            if self._keeps and "old_logps" not in made.batch:
                made.batch["old_logps"] = get_logps(model, made.batch)
                self._keep(micro_batch, made.batch, some)
            micro_batches.append(made)
        return replace(update, micro_batches=tuple(micro_batches))

    def _draw(self, model: Any, micro_batch: MicroBatch, device: torch.device) -> list[Group]:
        """The answers to the prompts of a micro-batch, as they were kept or newly drawn."""
        seeds, sampling = micro_batch.batch["seeds"], self._sampling
        if all(seed in self._kept for seed in seeds):
            return [self._kept[seed] for seed in seeds]
        if micro_batch.is_filler:  # nothing is learnt from it
            sampling = replace(sampling, max_new_tokens=1)
        prompts = move_micro_batch(micro_batch, device).batch
        drawn = draw_answers(model, prompts, seeds, self._size, self._tokenizer, sampling)
        starts = range(0, len(drawn), self._size)
        return [Group(drawn[start : start + self._size]) for start in starts]

    def _score(self, update: Update, groups: Sequence[Sequence[Group]], topology: Topology) -> None:
        """Have new answers scored; what fails on one rank fails on all of them."""
        new: list[tuple[Group, Mapping[str, Any]]] = []
        for micro_batch, some in zip(update, groups, strict=True):
            for group, row in zip(some, micro_batch.batch["rows"], strict=True):
                if micro_batch.is_filler:
                    group.rewards = [[0.0] * len(self._functions)] * self._size
                elif not group.rewards:
                    new.append((group, row))
        answers = [a for g, row in new for a in read_answers(g.answers, row, self._tokenizer)]
        rewards, problem = [], ""
        try:
            rewards = score(self._functions, answers)
        except DataError as error:
            problem = str(error)
        first = next(filter(None, gather_objects(problem, topology)), None)
        if first is not None:
            raise DataError(f"{first} If there is a checkpoint, --resume auto continues from it.")
        for number, (group, _) in enumerate(new):
            group.rewards = rewards[number * self._size : (number + 1) * self._size]
        self._drawn_updates += bool(new)
        if new and self._drawn_updates % self._show_every == 1 % self._show_every:
            prompt, total = answers[0].prompt, add_up(rewards[0], self._functions)
            question = prompt[-1]["content"] if isinstance(prompt, list) else prompt
            shown = (shorten(text, _SHOWN_LETTERS) for text in (question, answers[0].text))
            get_logger().info("answer    %s -> %s (reward %.4g)", *shown, total)

    def _gather(
        self, model: Any, update: Update, groups: Sequence[Sequence[Group]], topology: Topology
    ) -> list[Scored]:
        """What is known of all answers of the update, on every rank."""
        ends = get_end_ids(model, self._tokenizer)
        mine = [
            Scored(add_up(values, self._functions), values, len(ids), ids[-1] not in ends)
            for micro_batch, some in zip(update, groups, strict=True)
            for group in some
            for ids, values in zip(group.answers, group.rewards, strict=True)
            if not micro_batch.is_filler
        ]
        return [answer for part in gather_objects(mine, topology) for answer in part]

    def _join(self, batch: Batch, groups: Sequence[Group], all_rewards: Sequence[float]) -> Batch:
        """Prompts with their answers, padded on the right, and what each answer is worth."""
        totals = [[add_up(values, self._functions) for values in group.rewards] for group in groups]
        worth = compute_advantages(totals, self._scale, all_rewards)
        rows: list[dict[str, Any]] = []
        for place, group in enumerate(groups):
            prompt = batch["input_ids"][place][batch["attention_mask"][place].bool()].tolist()
            before = len(prompt)
            for number, answer in enumerate(group.answers):
                row = {"input_ids": [*prompt, *answer], "advantages": float(worth[place][number])}
                row["labels"] = [*[IGNORED_LABEL] * before, *answer]
                if group.old_logps is not None:
                    row["old_logps"] = [*[0.0] * before, *group.old_logps[number]]
                rows.append(row)
        return self._pad(rows)

    def _keep(self, micro_batch: MicroBatch, batch: Batch, groups: Sequence[Group]) -> None:
        if micro_batch.is_filler:
            return
        counted = (batch["labels"] != IGNORED_LABEL).cpu()
        rows = zip(batch["old_logps"].cpu(), counted, strict=True)
        logps = [row[is_counted].tolist() for row, is_counted in rows]
        seeds = micro_batch.batch["seeds"]
        for number, (seed, group) in enumerate(zip(seeds, groups, strict=True)):
            group.old_logps = logps[number * self._size : (number + 1) * self._size]
            self._kept[seed] = group

    def state_dict(self) -> dict[str, Any]:
        """The kept answers of all ranks."""
        mine = [[list(seed), asdict(group)] for seed, group in self._kept.items()]
        everyone = gather_objects(mine, self._topology) if self._topology is not None else [mine]
        return {"kept": [pair for part in everyone for pair in part]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = {tuple(seed): Group(**group) for seed, group in state.get("kept", [])}


EPSILON = 1e-4
"""Added to a standard deviation, which may be 0."""


class Scored(NamedTuple):
    """What is known of an answer besides its tokens: plain numbers, for all ranks."""

    reward: float
    rewards: list[float]
    """Of each function; NaN where it does not apply."""
    length: int
    is_cut: bool
    """Whether it has no end."""


def compute_advantages(
    groups: Sequence[Sequence[float]], scale: str, everyone: Sequence[float]
) -> list[list[float]]:
    """Each reward minus its group's mean; divided by a deviation unless ``scale`` is none.

    Deviations are unbiased: of the group's rewards, or of ``everyone`` in the update (batch).
    """
    of_update = measure_deviation(everyone) if scale == "batch" else None

    def compare(rewards: Sequence[float]) -> list[float]:
        mean, divisor = fmean(rewards), 1.0
        if scale != "none":
            deviation = measure_deviation(rewards) if of_update is None else of_update
            divisor = deviation + EPSILON
        return [(reward - mean) / divisor for reward in rewards]

    return [compare(rewards) for rewards in groups]


def measure_deviation(values: Sequence[float]) -> float:
    """The unbiased standard deviation; 0 of a single value."""
    return stdev(values) if len(values) > 1 else 0.0


def summarize(answers: Sequence[Scored], names: Sequence[str], group_size: int) -> dict[str, float]:
    """The numbers of an update, from all of its answers in groups; the names are TRL's."""
    rewards = [answer.reward for answer in answers]
    groups = [rewards[first : first + group_size] for first in range(0, len(rewards), group_size)]
    lengths = [answer.length for answer in answers]
    shown = {"reward": fmean(rewards), "reward_std": measure_deviation(rewards)}
    for place, name in enumerate(names):
        applied = [v for answer in answers if not math.isnan(v := answer.rewards[place])]
        shown[f"rewards/{name}/mean"] = fmean(applied) if applied else 0.0
        shown[f"rewards/{name}/std"] = measure_deviation(applied)
    shown["frac_reward_zero_std"] = fmean(measure_deviation(group) == 0 for group in groups)
    shown["completions/mean_length"] = fmean(lengths)
    shown["completions/min_length"] = min(lengths)
    shown["completions/max_length"] = max(lengths)
    shown["completions/clipped_ratio"] = fmean(answer.is_cut for answer in answers)
    return shown


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn. Unlike predictions, they follow no setting of the model's own.

    One number in [0, 1) decides one token: the first one at which the cumulated probabilities
    exceed it. The numbers of an answer follow from the sample's seed and its place in the group, so
    an answer does not depend on who draws it, nor on what is drawn in the same batch.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def build_processors(self, numbers: Tensor, start: int) -> LogitsProcessorList:
        processors = LogitsProcessorList()
        if self.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k is not None:
            processors.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            processors.append(TopPLogitsWarper(self.top_p))
        if self.min_p is not None:
            processors.append(MinPLogitsWarper(self.min_p))
        processors.append(_Draw(numbers, start))
        return processors


class _Draw(LogitsProcessor):
    """Leaves one token of each row: the one that its number draws."""

    def __init__(self, numbers: Tensor, start: int) -> None:
        self._numbers, self._start = numbers, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        number = self._numbers[:, input_ids.shape[1] - self._start, None]
        reached = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
        drawn = (reached <= number * reached[:, -1:]).sum(-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


def draw_answers(
    model: nn.Module,
    prompts: Batch,
    seeds: Sequence[SampleSeed],
    count: int,
    tokenizer: Any,
    sampling: Sampling,
) -> list[list[int]]:
    """``count`` answers to each prompt (padded on the left), with their end token if they end."""
    dice = [np.random.default_rng((*seed, place)) for seed in seeds for place in range(count)]
    ids = prompts["input_ids"]
    numbers = torch.from_numpy(
        np.stack([each.random(sampling.max_new_tokens) for each in dice])
    ).to(ids.device)
    batch = {
        name: prompts[name].repeat_interleave(count, 0) for name in ("input_ids", "attention_mask")
    }
    return generate_whole(
        model, batch, tokenizer, sampling.max_new_tokens,
        sampling.build_processors(numbers, ids.shape[1]),
    )  # fmt: skip


def generate_whole(
    model: nn.Module,
    prompts: Batch,
    tokenizer: Any,
    max_new_tokens: int,
    processors: LogitsProcessorList | None = None,
) -> list[list[int]]:
    """An answer to each prompt up to its end token, the likeliest one without processors."""
    generation = Generation(max_new_tokens=max_new_tokens, repetition_penalty=1.0)
    answers = generate(model, prompts, tokenizer, generation, processors=processors)
    ends = get_end_ids(model, tokenizer)
    return [_cut(answer.tolist(), ends) for (answer,) in answers]


def _cut(ids: list[int], ends: set[int]) -> list[int]:
    """Up to the first end token; what follows is padding."""
    stop = next((place for place, token in enumerate(ids, 1) if token in ends), len(ids))
    return ids[:stop]
