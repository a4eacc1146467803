"""Draw answers with transformers' ``generate`` and its cache, each from random numbers of its own.

One number in [0, 1) decides one token: the first one at which the cumulated probabilities exceed
it. The numbers of an answer follow from the sample's seed and the answer's place in its group, so
an answer does not depend on who draws it, nor on what is drawn in the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

from rapidformer.data.random_numbers import SampleSeed
from rapidformer.tasks.base import Batch
from rapidformer.tasks.evaluation.generating import Generation, generate, get_end_ids


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn. Unlike predictions, they follow no setting of the model's own."""

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


def draw_numbers(seed: SampleSeed, answers: int, tokens: int) -> np.ndarray[Any, Any]:
    """The random numbers of a sample's answers: [answers, tokens]."""
    return np.stack([np.random.default_rng((*seed, n)).random(tokens) for n in range(answers)])


def draw_answers(
    model: nn.Module,
    prompts: Batch,
    seeds: Sequence[SampleSeed],
    count: int,
    tokenizer: Any,
    sampling: Sampling,
) -> list[list[int]]:
    """``count`` answers to each prompt (padded on the left), with their end token if they end."""
    drawn = [draw_numbers(seed, count, sampling.max_new_tokens) for seed in seeds]
    ids = prompts["input_ids"]
    numbers = torch.from_numpy(np.concatenate(drawn)).to(ids.device)
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
