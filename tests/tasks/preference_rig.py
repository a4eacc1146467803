"""Tiny models and preferences, and one run of ours recorded step by step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rapidformer.engine import RapidformerEngine
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.runner import TaskFinetuner
from rapidformer.training.callbacks import Callback, Control, RunningLoop

WORDS = [f"w{number}" for number in range(40)]
LEARNING_RATE = 0.05


def make_tokenizer(*, pads_with_end: bool = False) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<end>"] if pads_with_end else ["<end>", "<pad>"]
    words = {word: number for number, word in enumerate([*special, *WORDS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token=special[-1], model_max_length=64
    )


def make_model(
    folder: Path, kind: str = "llama", *, is_reward: bool = False, pads_with_end: bool = False
) -> Path:
    """A model with fresh weights and its tokenizer, as ``from_pretrained`` finds them."""
    import transformers

    tokenizer = make_tokenizer(pads_with_end=pads_with_end)
    tokenizer.save_pretrained(folder)
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": tokenizer.pad_token_id}
    head = "ForSequenceClassification" if is_reward else ""
    torch.manual_seed(0)
    if kind == "llama":
        config: Any = transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
            initializer_range=0.2, num_labels=1, **ids,
        )  # fmt: skip
        name = f"Llama{head or 'ForCausalLM'}"
    else:
        config = transformers.GPT2Config(
            vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64,
            initializer_range=0.2, num_labels=1, **ids,
        )  # fmt: skip
        name = f"GPT2{head or 'LMHeadModel'}"
    getattr(transformers, name)(config).save_pretrained(folder)
    return folder


def make_pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    dice = random.Random(seed)

    def say(most: int) -> str:
        return " ".join(dice.choice(WORDS) for _ in range(dice.randint(1, most)))

    return [
        {"prompt": f"{say(6)} ", "chosen": f"{say(5)} w{number % 7}", "rejected": say(5)}
        for number in range(count)
    ]


def make_answers(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 3 != 1}
        for number, row in enumerate(make_pairs(count, seed))
    ]


def read_whole(parameter: Any) -> Tensor:
    """A copy of a parameter, also of one that is split over processes."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    copy: Tensor = whole.detach().clone()
    return copy


class Recorder(Callback):
    """The numbers and the weights of each step."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []
        self.weights: list[dict[str, Tensor]] = []

    def on_log(self, loop: RunningLoop, control: Control, line: dict[str, Any]) -> None:
        if "loss" in line:
            self.lines.append(line)

    def on_step_end(self, loop: RunningLoop, control: Control) -> None:
        model: Any = loop.engine.model.module
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.weights.append({name: read_whole(p) for name, p in trained})


def run_ours(
    task: str, folder: Path | str, rows: list[dict[str, Any]], **settings: Any
) -> Recorder:
    """Train with plain SGD, in the order of the rows."""
    args = {
        "task": task, "pretrained_model_name_or_path": str(folder), "optimizer": "sgd",
        "sgd_momentum": 0.0, "weight_decay": 0.0, "lr": LEARNING_RATE, "clip_grad": 0.0,
        "lr_decay_style": "constant", "dataloader_type": "single", "epochs": 1, "save": "none",
        "log_interval": 1, "progress": False, "log_level": "error", "seq_length": 64, **settings,
    }  # fmt: skip
    engine = RapidformerEngine(args=args)
    recorder = Recorder()
    finetuner = TaskFinetuner(engine, get_task(task), {"train": rows})
    finetuner.callbacks = [recorder]
    try:
        finetuner.train()
    finally:
        engine.close(gives_back=False)
    return recorder
