"""A plain DPO run in miniature, whose objective notes what it sees of each pair."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer.engine import RapidformerEngine
from rapidformer.models.adapter_folder import load_adapter
from rapidformer.objectives import Context, Objective, Term
from rapidformer.objectives.logprobs import get_token_logprobs
from rapidformer.objectives.reference import get_reference_logprobs
from rapidformer.training.finetuner import Finetuner

WORDS, PAIRS = 24, 6
SETTINGS = {
    "epochs": 2, "micro_batch_size": 1, "global_batch_size": 4, "optimizer": "sgd", "lr": 0.3,
    "lr_decay_style": "constant", "clip_grad": 0.0, "dataloader_type": "single", "save": "none",
    "log_level": "error", "progress": False,
}  # fmt: skip
Seen = dict[tuple[int, ...], list[tuple[float, float, float]]]
"""Of each pair, at each of its turns: the loss and the reference's answers."""


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=16, max_position_embeddings=32,
        initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_pairs() -> list[dict[str, list[int]]]:
    """A prompt of two tokens and two answers; the first token tells pairs apart."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(8, WORDS, (count,), generator=generator).tolist()

    return [
        {"prompt": [1 + number, *draw(1)], "chosen": draw(4), "rejected": draw(2 + number % 5)}
        for number in range(PAIRS)
    ]


def collate(pairs: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Two rows for each pair, of even length: context parallelism splits them."""
    ids, labels = torch.zeros(2 * len(pairs), 8, dtype=torch.long), []
    for place, (pair, side) in enumerate((p, s) for p in pairs for s in ("chosen", "rejected")):
        row = pair["prompt"] + pair[side]
        ids[place, : len(row)] = torch.tensor(row)
        wanted = torch.full((8,), -100)
        wanted[2 : len(row)] = torch.tensor(pair[side])
        labels.append(wanted)
    return {
        "input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.stack(labels),
    }  # fmt: skip


class Dpo(Objective):
    """-log sigmoid of what the policy has learnt to prefer."""

    frozen = ("reference",)

    def __init__(self) -> None:
        self.seen: Seen = defaultdict(list)

    def compute(self, model: Any, batch: Any, context: Context) -> Term:
        labels = batch["labels"]
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        policy = get_token_logprobs(model, inputs, labels).sum(-1)
        reference = get_reference_logprobs(context, batch, labels)
        gained = (policy - reference).view(-1, 2)
        losses = -functional.logsigmoid(0.1 * (gained[:, 0] - gained[:, 1]))
        told = zip(losses.tolist(), *reference.view(-1, 2).T.tolist(), strict=True)
        for row, numbers in zip(batch["input_ids"][::2].tolist(), told, strict=True):
            self.seen[tuple(row)].append(numbers)
        return Term(losses.mean(), len(losses))


class Preferring(Finetuner):
    """With an adapter, the run goes on with it."""

    uses_dropout = False

    def __init__(
        self, engine: RapidformerEngine, adapter: Path | None = None, pairs: Any = None
    ) -> None:
        super().__init__(engine)
        self._adapter, self._objective = adapter, Dpo()
        self._pairs = make_pairs() if pairs is None else pairs

    def train_valid_test_datasets_provider(self) -> tuple[Any, Any, Any, Any]:
        return self._pairs, None, None, collate

    def model_optimizer_lr_scheduler_provider(self) -> tuple[Any, Any, Any]:
        def build() -> Any:
            model = build_model()
            return model if self._adapter is None else load_adapter(model, self._adapter)

        return self.engine.build_model(build), None, None

    def build_objective(self) -> Objective:
        return self._objective


def run(settings: dict[str, Any], adapter: Path | None = None, pairs: Any = None) -> Seen:
    """Train, and return what this process has seen."""
    torch.set_num_threads(1)
    engine = RapidformerEngine(args={**SETTINGS, **settings})
    template = Preferring(engine, adapter, pairs)
    template.train()
    engine.close(gives_back=False)
    return dict(template._objective.seen)


def answer(model: Any) -> dict[tuple[int, ...], tuple[float, float]]:
    """What a plain model says of each pair, with nothing of the library."""
    answers = {}
    with torch.no_grad():
        for pair in make_pairs():
            batch = collate([pair])
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            losses = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none"
            )
            first, second = (-losses.view(2, -1).sum(-1)).tolist()
            answers[tuple(batch["input_ids"][0].tolist())] = (first, second)
    return answers
