"""GRPO gives the same run however its prompts are split, also if it stops in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rapidformer.engine import RapidformerEngine
from rapidformer.errors import DataError
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.runner import TaskFinetuner
from rapidformer.training.callbacks import Callback, Control, RunningLoop
from tests.processes import run_in_kept_processes

REWARD = """
def reward(prompts, answers, wanted, **columns):
    return [float(answer.count(word)) for answer, word in zip(answers, wanted, strict=True)]

def brief(prompts, answers, answer_ids):
    return [-0.1 * len(ids) for ids in answer_ids]

def broken(prompts, answers, wanted):
    if "w5" in wanted:
        raise ValueError("no w5, please")
    return [0.0] * len(answers)
"""
Lines = list[dict[str, Any]]
SHOWN = ("loss", "reward", "reward_std", "kl", "entropy", "grad_norm")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, 6 prompts of different lengths and reward functions."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("toy")
    words = ["<end>", "<unk>", *(f"w{n}" for n in range(14))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<end>", model_max_length=32
    ).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, initializer_range=0.3,
        bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    prompts = [" ".join(f"w{n}" for n in range(count)) for count in range(1, 7)]
    rows = [{"prompt": prompt, "wanted": prompt.split()[-1]} for prompt in prompts]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text(REWARD)
    return folder


class Recorder(Callback):
    def __init__(self) -> None:
        self.lines: Lines = []

    def on_log(self, loop: RunningLoop, control: Control, line: dict[str, Any]) -> None:
        self.lines.append(line)


def train(toy: Path, **settings: Any) -> Lines:
    """Two epochs of two updates: 4 prompts and 1, for which a second process has a filler."""
    values = {
        "task": "grpo", "pretrained_model_name_or_path": str(toy / "model"),
        "train_data": [str(toy / "train.jsonl")], "save": "none", "log_interval": 1,
        "reward_function": [str(toy / "score.py"), f"{toy / 'score.py'}:brief"],
        "num_generations": 3, "max_new_tokens": 4, "beta": 0.05, "epochs": 2, "lr": 0.1,
        "optimizer": "sgd", "lr_decay_style": "constant", "clip_grad": 0.0, "micro_batch_size": 1,
        "global_batch_size": 4, "temperature": 0.9, "max_train_samples": 5, **settings,
    }  # fmt: skip
    engine = RapidformerEngine(args=values)
    finetuner, heard = TaskFinetuner(engine, get_task("grpo")), Recorder()
    finetuner.callbacks = [heard]
    try:
        finetuner.train()
    finally:
        engine.close(gives_back=False)
    return heard.lines


def train_each(toy: Path, layouts: list[dict[str, Any]]) -> tuple[list[Lines], str]:
    """Also what is said if a function fails in an evaluation, on the last rank alone."""
    found = [train(toy, **layout) for layout in layouts]
    with pytest.raises(DataError) as caught:
        train(toy, reward_function=[f"{toy / 'score.py'}:broken"], epochs=1,
              valid_data=[str(toy / "train.jsonl")], eval_micro_batch_size=1)  # fmt: skip
    return found, str(caught.value)


def check(found: Lines, wanted: Lines) -> None:
    assert [line["step"] for line in found] == [line["step"] for line in wanted]
    names = [name for name in wanted[0] if "/" in name or name in SHOWN]
    for mine, theirs in zip(found, wanted, strict=True):
        expected = pytest.approx({n: theirs[n] for n in names}, abs=1e-6, rel=4e-6)
        assert {n: mine[n] for n in names} == expected


def test_splits_change_nothing(toy: Path) -> None:
    """Accumulation of 1, 2 and 4, two processes, ZeRO-3, several updates per generation.

    An error in an evaluation is told on every rank."""
    alone = train(toy, micro_batch_size=4)
    assert len(alone) == 4 and len({line["reward"] for line in alone}) > 1
    assert all(line["reward_std"] > 0 for line in alone) and alone[-1]["kl"] > 0
    again = {
        "updates_per_generation": 2, "loss": "grpo", "scale_rewards": "batch",
        "lr": 0.2, "clip_epsilon": 0.05,
    }  # fmt: skip
    twice = train(toy, micro_batch_size=4, **again)
    rewards = [line["reward"] for line in twice]
    assert rewards[0] == rewards[1] and rewards[3] == rewards[4] and len(set(rewards)) == 4
    assert any(line["clip_ratio/region_mean"] > 0 for line in twice)
    check(train(toy), alone)
    layouts: list[dict[str, Any]] = [{}, {"zero_3_memory_optimization": True, **again}]
    for results, problem in run_in_kept_processes(train_each, 2, toy, layouts):
        assert "function broken failed on validation, row 6" in problem and "no w5" in problem
        for found in results[:-1]:
            check(found, alone)
        check(results[-1], twice)


def test_a_resumed_run_continues(toy: Path, tmp_path: Path) -> None:
    """Also between two updates that learn from the same answers."""
    run, options = str(tmp_path / "run"), {"updates_per_generation": 2, "save_interval": 1}
    whole = train(toy, **options, save=str(tmp_path / "whole"))
    train(toy, **options, save=run, exit_interval=4)
    rest = train(toy, **options, save=run, load=run)
    assert [line["step"] for line in rest] == [5, 6]
    check(rest, whole[4:])


def test_a_failing_function_loses_nothing(toy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    functions = [f"{toy / 'score.py'}:broken"]
    with pytest.raises(DataError, match=r"function broken failed on train, row 6 .*no w5, please"):
        train(toy, save=str(run), save_interval=1, global_batch_size=2, micro_batch_size=2,
              reward_function=functions, dataloader_type="single", max_train_samples=6)  # fmt: skip
    assert sorted(path.name for path in run.glob("iter_*")) == ["iter_0000001", "iter_0000002"]
