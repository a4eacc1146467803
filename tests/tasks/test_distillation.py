"""Learning from a teacher: the same on every layout, from one that knows the same words."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rapidformer.cli.evaluate import evaluate
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.objectives import BoundObjective, Context
from rapidformer.objectives.distillation import Distillation
from rapidformer.tasks.registry import describe_unused_flags, get_task
from rapidformer.tasks.runner import train_task
from tests.processes import run_in_kept_processes

from .conftest import make_args, write_jsonl

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(28))]
TASK = get_task("distillation")


def make_model(folder: Path, words: list[str], *, seed: int, hidden: int, ids: int) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>", model_max_length=32,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=ids, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=16, max_position_embeddings=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, initializer_range=0.3, attention_dropout=0.5,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A student, a wider teacher whose vocabulary is padded to more ids, and rows."""
    folder, dice = tmp_path_factory.mktemp("distillation"), random.Random(0)
    for split, count in (("train", 12), ("validation", 5)):
        rows = [
            {
                "prompt": " ".join(dice.choices(WORDS[4:], k=dice.randint(1, 4))),
                "response": " ".join(dice.choices(WORDS[4:], k=dice.randint(1, 5))),
            }
            for _ in range(count)
        ]
        write_jsonl(folder / "data" / f"{split}.jsonl", rows)
    return SimpleNamespace(
        data=str(folder / "data"), folder=folder,
        student=make_model(folder / "student", WORDS, seed=0, hidden=16, ids=32),
        teacher=make_model(folder / "teacher", WORDS, seed=1, hidden=32, ids=40),
    )  # fmt: skip


def get_settings(files: SimpleNamespace, **more: Any) -> dict[str, Any]:
    return {
        "task": "distillation", "pretrained_model_name_or_path": files.student,
        "teacher": files.teacher, "data_path": files.data, "epochs": 2, "micro_batch_size": 2,
        "global_batch_size": 8, "optimizer": "sgd", "lr": 0.5, "lr_decay_style": "constant",
        "clip_grad": 0.0, "dataloader_type": "single", "save": "none", "log_level": "error",
        "progress": False, **more,
    }  # fmt: skip


def train(settings: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(1)
    engine = RapidformerEngine(args=settings)
    metrics = train_task(engine)
    engine.close(gives_back=False)
    return metrics


# ---- the loss ------------------------------------------------------------------------------------


class Table(nn.Module):
    """Says of each token with which probability word 0 follows it, otherwise word 1."""

    def __init__(self, *probabilities: float) -> None:
        super().__init__()
        rows = [[p, 1 - p] for p in probabilities]
        self.logits = nn.Parameter(torch.tensor(rows, dtype=torch.float64).log())

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.logits[input_ids]}


@pytest.mark.parametrize("size", [1, 2])
def test_each_answer_token_counts_once(size: int) -> None:
    """One token with a divergence of 1 and three with one of 3: 2.5, not the 2 of two means."""
    rows = [
        {"input_ids": torch.tensor([0, 0, 0, 0]), "labels": torch.tensor([-100, 0, -100, -100])},
        {"input_ids": torch.tensor([1, 1, 1, 1]), "labels": torch.tensor([-100, 0, 0, 0])},
    ]
    engine = RapidformerEngine(args={"micro_batch_size": size, "global_batch_size": 2, "lr": 0.1})
    loader = engine.data.build_loader(rows, shuffle=False, is_training=True)
    model, *_ = engine.compose(Table(math.exp(-1), math.exp(-3)))
    teacher = Table(1.0, 1.0)
    teacher.logits.data.clamp_(min=-1e4)
    engine.updates.weights.shifts_labels = True
    forward = BoundObjective(Distillation(), model, {"teacher": teacher})
    results = engine.run_update(forward, next(engine.data.iterate_updates(loader)))
    total = sum(float(result.loss) * float(result.weight) for result in results)
    assert total / sum(float(result.weight) for result in results) == pytest.approx(2.5, abs=1e-6)
    gradients = model.logits.grad[:, 0].tolist()  # of the mean over four tokens
    expected = [(math.exp(-1) - 1) / 4, 3 * (math.exp(-3) - 1) / 4]
    assert gradients == pytest.approx(expected, abs=1e-6)


def load_trl_loss() -> Any:
    """TRL's own function, without the seconds that importing its trainer takes."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("needs trl")
    file = Path(spec.origin).parent / "experimental" / "gkd" / "gkd_trainer.py"
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    found = next(n for n in nodes if getattr(n, "name", "") == "generalized_jsd_loss")
    found.decorator_list = []  # type: ignore[attr-defined]
    names: dict[str, Any] = {"torch": torch, "F": functional}
    exec(compile(ast.Module([found], []), str(file), "exec"), names)  # type: ignore[list-item]
    return names["generalized_jsd_loss"]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_loss_and_gradient_are_those_of_trl(beta: float) -> None:
    torch.manual_seed(0)
    student, teacher = (3 * torch.randn(2, 6, 9) for _ in range(2))
    labels = torch.randint(0, 9, (2, 6))
    labels[0, :3] = labels[1, 5] = -100
    ours, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    objective = Distillation(beta=beta, temperature=0.9)
    sums = objective.sum(ours, teacher, labels)
    count = int((labels[:, 1:] != -100).sum())
    loss = load_trl_loss()(
        theirs[:, :-1], teacher[:, :-1], labels[:, 1:], beta=beta, temperature=0.9,
        num_items_in_batch=count,
    )  # fmt: skip
    loss.backward()
    (sums.loss / count / 0.9**2).backward()
    assert float(sums.divergence) / count == pytest.approx(float(loss.detach()), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


# ---- the run -------------------------------------------------------------------------------------


def train_all(runs: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [train(settings) for settings in runs]


@pytest.mark.slow
def test_layouts_learn_the_same(files: SimpleNamespace) -> None:
    """Also if the teacher's layout is another one; in 16 bits it says something else.

    Split layers and sequences are in tests/parity/test_token_logprobs.py.
    """
    mixed = get_settings(files, divergence="jsd", distillation_beta=0.3, epochs=1)
    expected = train(mixed)
    assert expected == pytest.approx(train({**mixed, "micro_batch_size": 8}), rel=2e-6)
    rounded = train({**mixed, "teacher_precision": "bf16"})
    assert rounded != pytest.approx(expected, rel=3e-6)
    assert rounded == pytest.approx(expected, rel=0.05)
    layouts: list[dict[str, Any]] = [
        {"zero_3_memory_optimization": True}, {"shard_teacher": True},
        {"pipeline_model_parallel_size": 2},
    ]  # fmt: skip
    runs = run_in_kept_processes(train_all, 2, [{**mixed, **layout} for layout in layouts])[0]
    for layout, metrics in zip(layouts, runs, strict=True):
        assert metrics == pytest.approx(expected, rel=3e-6), layout


@pytest.mark.slow
def test_a_run_is_evaluated_with_its_teacher(files: SimpleNamespace, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    shown = get_settings(files, save=folder, distillation_temperature=2.0, distillation_alpha=0.7)
    trained = train({**shown, "epochs": 4})
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    first, *_, last = [line for line in lines if "divergence_loss" in line]
    parts = 0.7 * 4 * first["divergence_loss"] + 0.3 * first["label_loss"]
    assert first["loss"] == pytest.approx(parts, rel=1e-5)
    assert last["divergence_loss"] < 0.8 * first["divergence_loss"]
    report = evaluate(load=folder, log_level="error", progress=False).metrics
    assert report["perplexity"] == pytest.approx(math.exp(report["label_loss"]))
    names = ("loss", "divergence_loss", "label_loss", "accuracy")
    best = min(lines, key=lambda line: line.get("eval_loss", math.inf))
    assert {n: report[n] for n in names} == pytest.approx({n: best[f"eval_{n}"] for n in names})
    assert set(report) == set(trained) == set(TASK.metrics)
    config = json.loads((tmp_path / "run" / "best" / "config.json").read_text())
    assert config["attention_dropout"] == 0.5  # off in this run only


def test_settings_of_chats_are_read_too() -> None:
    given = make_args(packing=True, teacher="t", mask_prob=0.2)
    given.is_changed = lambda name: name in ("packing", "teacher", "mask_prob")
    assert describe_unused_flags(given, TASK) == "no effect with --task distillation: --mask-prob."


# ---- what is refused -----------------------------------------------------------------------------


def test_a_teacher_must_know_the_same_words(files: SimpleNamespace) -> None:
    swapped = [*WORDS[:8], WORDS[9], WORDS[8], *WORDS[10:]]
    other = make_model(files.folder / "other", swapped, seed=1, hidden=16, ids=32)
    message = r"--teacher .*other has another vocabulary than .*student: token 8 is 'w5' there and"
    with pytest.raises(ModelError, match=message):
        train(get_settings(files, teacher=other))
    fewer = make_model(files.folder / "fewer", WORDS[:20], seed=1, hidden=16, ids=20)
    with pytest.raises(ModelError, match=r"fewer knows 20 tokens, and .*student has ids up to 31"):
        train(get_settings(files, teacher=fewer))


def test_a_missing_teacher_is_named(files: SimpleNamespace) -> None:
    with pytest.raises(ConfigurationError, match=r"--task distillation needs --teacher MODEL"):
        train(get_settings(files, teacher=None))
    with pytest.raises(ModelError, match=r"--teacher \./nowhere: There is no model folder nowhere"):
        train(get_settings(files, teacher="./nowhere"))


def test_a_white_box_may_hand_over_a_teacher() -> None:
    """A plain module is asked like any other frozen model."""
    teacher, student = Table(0.5), Table(0.7)
    batch = {
        "input_ids": torch.zeros(1, 3, dtype=torch.long),
        "labels": torch.tensor([[-100, 0, 1]]),
    }
    terms = Distillation(alpha=0.5).compute(student, batch, Context(frozen={"teacher": teacher}))
    divergence = 0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3)
    label_loss = -(math.log(0.7) + math.log(0.3)) / 2
    shown = [float(terms[n].mean.detach()) for n in ("divergence_loss", "label_loss", "loss")]
    expected = [divergence, label_loss, (divergence + label_loss) / 2]
    assert shown == pytest.approx(expected, rel=1e-6)
