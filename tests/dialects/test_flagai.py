"""FlagAI's trainer: the document's T5 script under every ``env_type``, and its arguments."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

from rapidformer.config import resolve
from rapidformer.config.schema import get_settings
from rapidformer.dialects.calls import in_words_of
from rapidformer.dialects.flagai import Trainer
from rapidformer.dialects.flagai import settings as flagai_settings
from rapidformer.dialects.flagai.names import FLAGAI
from rapidformer.errors import CheckpointError, ConfigurationError, RapidformerError, WriteError
from tests.dialects.small import collate, make_classifier, make_rows
from tests.processes import run_in_processes

SCRIPT = Path(__file__).parent / "scripts" / "flagai_t5.py"
WORDS = [f"w{i}" for i in range(30)]
LAUNCH = """
    master_ip='127.0.0.1',
    master_port=17750,
    num_nodes=1,
    num_gpus={processes},
    hostfile='./hostfile',
    training_script=__file__,
"""
CONSTRUCTOR = """trainer = MyTrainer(
    env_type={env_type!r},
    epochs=1,
    batch_size={batch},
    eval_interval=10,
    log_interval=1,
    experiment_name='t5-3b',
    load_dir=None,
    lr=1e-4,{launch}{more})
"""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "weight_decay": 0.1}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the script finds in its folder: a T5 with its tokenizer, and the toy data."""
    return fill(tmp_path)


def fill(tmp_path: Path) -> Path:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{w}", -2.0) for w in WORDS)]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0)
    tokenizer.save_pretrained(tmp_path / "t5-3b")
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5-3b")
    lines = [" ".join(WORDS[(i + k) % 30] for k in range(4)) for i in range(20)]
    (tmp_path / "train_inputs.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "train_targets.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "deepspeed.json").write_text(json.dumps(DEEPSPEED))
    return tmp_path


def run_script(
    python: Path,
    folder: Path,
    *,
    env_type: str,
    batch: int,
    processes: int = 1,
    more: str = "",
    flags: str = "",
) -> subprocess.CompletedProcess[str]:
    """``python script.py`` with another of the document's constructors, as a user would."""
    launch = LAUNCH.format(processes=processes) if env_type != "pytorch" else ""
    made = CONSTRUCTOR.format(env_type=env_type, batch=batch, launch=launch, more=more)
    text = re.sub(
        r"trainer = MyTrainer\(.*?\n    fp16=False\)\n", made, SCRIPT.read_text("utf-8"), flags=re.S
    )
    assert made in text
    (folder / "train.py").write_text(text, encoding="utf-8")
    return subprocess.run(
        [python, "train.py", *flags.split()], cwd=folder, text=True, capture_output=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, timeout=280, check=False,
    )  # fmt: skip


def read_losses(folder: Path) -> list[float]:
    lines = (folder / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    return [value["loss"] for value in map(json.loads, lines) if "loss" in value]


@pytest.fixture(scope="module")
def alone(python: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process, with the same rows in every update."""
    folder = fill(tmp_path_factory.mktemp("alone"))
    done = run_script(python, folder, env_type="pytorch", batch=4)
    assert done.returncode == 0, done.stderr
    losses = read_losses(folder)
    assert len(losses) == 4
    return losses


def test_ddp_launches_itself_and_passes_flags_on(
    python: Path, folder: Path, alone: list[float]
) -> None:
    more = "    deepspeed_config='deepspeed.json'\n"
    done = run_script(
        python, folder, env_type="pytorchDDP", batch=2, processes=2, more=more, flags="--mine 3"
    )
    assert done.returncode == 0, done.stderr
    assert "there is no hostfile ./hostfile: the run is on this node alone" in done.stderr
    assert "deepspeed_config='deepspeed.json' is not used: env_type is 'pytorchDDP'" in done.stderr
    assert "2 processes on CPU" in done.stderr
    assert read_losses(folder) == pytest.approx(alone, abs=1e-5)


def test_deepspeed(python: Path, folder: Path, alone: list[float]) -> None:
    more = "    deepspeed_config='deepspeed.json'\n"
    done = run_script(python, folder, env_type="deepspeed", batch=4, processes=2, more=more)
    assert done.returncode == 0, done.stderr
    assert "deepspeed.json wins over the Trainer's own arguments: micro_batch_size 4 (now 2)." in (
        done.stderr
    )
    assert "ZeRO-1 over 2 ranks" in done.stderr
    assert read_losses(folder) == pytest.approx(alone, abs=1e-5)


def test_deepspeed_with_model_parallelism(python: Path, folder: Path, alone: list[float]) -> None:
    """Our tensor parallelism, under DeepSpeed's own ZeRO-1."""
    more = "    deepspeed_config='deepspeed.json',\n    model_paralle_size = 2\n"
    done = run_script(python, folder, env_type="deepspeed+mpu", batch=2, processes=4, more=more)
    assert done.returncode == 0, done.stderr
    assert re.search(r"DeepSpeed [\d.]+, ZeRO-1 over 2 ranks", done.stderr)
    assert "tensor parallelism: 2 ranks (plan: " in done.stderr
    assert read_losses(folder) == pytest.approx(alone, abs=1e-5)


def test_a_failing_script_has_a_true_status(python: Path, folder: Path) -> None:
    (folder / "train_targets.txt").unlink()
    done = run_script(python, folder, env_type="pytorchDDP", batch=2, processes=2)
    assert done.returncode == 1
    assert "No such file or directory: 'train_targets.txt'" in done.stderr


# ---- in this process -----------------------------------------------------------------------------


class Small(Trainer):
    def forward_step(self, data: Any, model: Any, mems: Any) -> dict[str, Any]:
        outputs = model(**data)
        return {"loss": outputs.loss, "logits": outputs.logits}


def make_trainer(folder: Path, cls: type[Trainer] = Small, **given: Any) -> Any:
    return cls(**{"env_type": "pytorch", "epochs": 1, "batch_size": 4, "lr": 1e-3,
                  "save_dir": str(folder / "run"), "tensorboard_dir": str(folder / "board"),
                  **given})  # fmt: skip


def accuracy(predictions: Any, labels: Any) -> float:
    return float((predictions == labels).float().mean())


def test_metrics_and_what_a_run_leaves(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_interval=2, experiment_name="small")
    seen: list[Any] = []

    def with_everything(predictions: Any, labels: Any, meta: Any, tokenizer: Any) -> float:
        seen.append((predictions.shape, labels.shape, meta, tokenizer))
        return 1.0

    done = trainer.train(
        make_classifier(), train_dataset=make_rows(), valid_dataset=make_rows(13, 1),
        collate_fn=collate, metric_methods=[["acc", accuracy], ["own", with_everything]],
    )  # fmt: skip
    assert done is None
    assert seen == [((13,), (13,), None, None)] * 2
    assert list((tmp_path / "board" / "small").iterdir())
    assert trainer.evaluate().keys() == {"acc", "own", "loss"}
    assert isinstance(trainer, Small) and type(trainer).__name__ == "Small"


def make_roberta() -> Any:
    torch.manual_seed(0)
    return RobertaForSequenceClassification(RobertaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))  # fmt: skip


def train_small(folder: Path, make_model: Any, **given: Any) -> Any:
    trainer = make_trainer(folder, log_interval=1, **given)
    trainer.train(make_model(), train_dataset=make_rows(), valid_dataset=make_rows(13, 1),
                  collate_fn=collate, metric_methods=[["acc", accuracy]])  # fmt: skip
    return trainer, [line["loss"] for line in trainer.state.log_history if "loss" in line]


def train_split(folder: Path, make_model: Any, stage: int) -> dict[str, Any]:
    """In one of two processes, and once more from a checkpoint in the middle."""
    config = {
        **DEEPSPEED, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    }  # fmt: skip
    (folder / "deepspeed.json").write_text(json.dumps(config))
    given = {
        "env_type": "deepspeed+mpu", "deepspeed_config": str(folder / "deepspeed.json"),
        "model_parallel_size": 2, "num_gpus": 2,
    }  # fmt: skip
    first, losses = train_small(folder, make_model, save_interval=2, save_optim=True, **given)
    middle = str(folder / "run" / "iter_0000002")
    _, resumed = train_small(
        folder / "resumed", make_model, load_dir=middle, load_optim=True, **given
    )
    uses_deepspeed = first.engine.model.parallelized.deepspeed is not None
    return {"losses": losses, "resumed": resumed, "metrics": first.evaluate(),
            "uses_deepspeed": uses_deepspeed}  # fmt: skip


@pytest.mark.parametrize(
    ("make_model", "stage", "line"),
    [
        (make_classifier, 1, "tensor parallelism: 2 ranks (plan"),
        (make_roberta, 3, "rapidformer's own ZeRO-3 x tensor parallelism of 2 is used"),
    ],
)
def test_a_split_model_under_deepspeed(
    tmp_path: Path, make_model: Any, stage: int, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    alone, expected = train_small(tmp_path / "alone", make_model)
    found = run_in_processes(train_split, 2, tmp_path, make_model, stage)[0]
    said = capfd.readouterr().err
    assert line in said and "ranks over" not in said
    counted = re.findall(r"model +\w+: (\S+) parameters", said)
    assert len(counted) > 1 and len(set(counted)) == 1, "of the whole model, however it is split"
    assert found["uses_deepspeed"] == (stage < 3)
    assert found["losses"] == pytest.approx(expected, abs=1e-5)
    assert found["resumed"] == found["losses"]  # the first two are the checkpoint's history
    assert found["metrics"] == pytest.approx(alone.evaluate(), abs=1e-5)
    saved = type(alone.model).from_pretrained(tmp_path / "run" / "last").state_dict()
    for name, weight in alone.model.state_dict().items():
        assert torch.allclose(saved[name], weight, atol=1e-5), name


def test_lora_trains_adapters_alone(tmp_path: Path) -> None:
    model = make_classifier()
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer = make_trainer(tmp_path, lora=True, lora_r=2, lora_target_modules=["query"])
    trainer.train(model, train_dataset=make_rows(), collate_fn=collate)
    config = trainer.engine.model.adapter.config
    assert (config.r, config.lora_alpha, config.lora_dropout) == (2, 16, 0.05)
    after = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    frozen = {name: p for name, p in after.items() if "original_module" not in name}
    assert frozen and any("query.base_layer" in name for name in frozen)
    for name, weight in frozen.items():
        assert torch.equal(weight, before[name.replace(".base_layer", "")]), name


def test_no_epochs_means_evaluation_only(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, epochs=0)
    model = make_classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train(model, train_dataset=make_rows(), valid_dataset=make_rows(13, 1),
                  collate_fn=collate)  # fmt: skip
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not (tmp_path / "run").exists()


def test_load_dir_takes_the_weights_alone(tmp_path: Path) -> None:
    first = make_trainer(tmp_path)
    first.train(make_classifier(), train_dataset=make_rows(), collate_fn=collate)
    second = make_trainer(tmp_path / "b", load_dir=str(tmp_path / "run"))
    model = make_classifier()
    second.train(model, train_dataset=make_rows(), collate_fn=collate)
    steps = [
        json.loads(x)["step"]
        for x in (tmp_path / "b/run/metrics.jsonl").read_text().split("\n")
        if x
    ]
    assert max(steps) == 4
    assert second.engine.checkpoints.resumed_from is None
    with pytest.raises(CheckpointError, match="does not fit BertForSequenceClassification"):
        make_trainer(tmp_path / "c", load_dir=str(tmp_path / "run")).train(
            _wider(), train_dataset=make_rows()
        )


def test_load_optim_never_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        trainer = make_trainer(tmp_path, load_dir=str(tmp_path / name), load_optim=True)
        with pytest.raises(CheckpointError, match=f"{name} holds no weights"):
            trainer.train(make_classifier(), train_dataset=make_rows(), collate_fn=collate)


def test_evaluation_alone_uses_the_weights_of_load_dir(tmp_path: Path) -> None:
    saved = make_classifier()
    with torch.no_grad():
        saved.classifier.bias += 1.0
    saved.save_pretrained(tmp_path / "saved")
    trainer = make_trainer(tmp_path, epochs=0, load_dir=str(tmp_path / "saved"), load_optim=True)
    model = make_classifier()
    trainer.train(model, valid_dataset=make_rows(4), collate_fn=collate)
    assert torch.equal(model.classifier.bias, saved.classifier.bias)


def _wider() -> Any:
    model = make_classifier()
    model.classifier = torch.nn.Sequential(model.classifier)
    return model


def test_save_best_decides(tmp_path: Path) -> None:
    scores: list[Any] = []

    def keep(best: Any, metrics: dict[str, float]) -> Any:
        scores.append(metrics["loss"])
        return metrics["loss"] if len(scores) == 1 else best  # never better again

    trainer = make_trainer(tmp_path, eval_interval=3, save_best=keep)
    trainer.train(make_classifier(), train_dataset=make_rows(), valid_dataset=make_rows(8, 1),
                  collate_fn=collate)  # fmt: skip
    assert len(scores) == 2
    saved = json.loads((tmp_path / "run" / "iter_0000004" / "run.json").read_text())
    assert saved["extra"]["progress"]["best_step"] == 3


def test_a_resumed_run_knows_its_best_score(tmp_path: Path) -> None:
    """Its count of best evaluations continues, so a later one can still be the best."""
    data = {"train_dataset": make_rows(), "valid_dataset": make_rows(8, 1), "collate_fn": collate}
    best: list[Any] = []

    def keep(score: Any, metrics: dict[str, float]) -> Any:
        best.append(score)
        return min(score, 1.0) if len(best) < 4 else 0.5

    given = {"eval_interval": 2, "save_interval": 2, "save_optim": True, "save_best": keep}
    make_trainer(tmp_path, **given).train(make_classifier(), **data)
    assert best == [float("inf"), 1.0]
    trainer = make_trainer(
        tmp_path, epochs=2, load_dir=str(tmp_path / "run"), load_optim=True, **given
    )
    trainer.train(make_classifier(), **data)
    assert best[2:] == [1.0, 1.0] and trainer._best.times == 2
    assert trainer.state.best_global_step == 8


def test_save_best_may_maximize_a_metric(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, eval_interval=4, save_best=lambda best, metrics: max(best, metrics["acc"])
    )
    for _ in range(2):  # the first score does not hold for the second training
        trainer.train(
            make_classifier(), train_dataset=make_rows(), valid_dataset=make_rows(8, 1),
            collate_fn=collate, metric_methods=[["acc", accuracy]],
        )  # fmt: skip
        saved = json.loads((tmp_path / "run" / "iter_0000004" / "run.json").read_text())
        assert saved["extra"]["progress"]["best_step"] == 4
        assert trainer._best.times == 1


class Sized(list[Any]):
    """A data set whose truth value nobody has defined, as an array's."""

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")


def test_an_evaluation_dataset_is_not_asked_for_its_truth(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, epochs=0)
    trainer.train(make_classifier(), valid_dataset=make_rows(4), collate_fn=collate)
    assert trainer.evaluate(Sized(make_rows(4)))["loss"] > 0


def test_every_name_has_a_row() -> None:
    for name, row in FLAGAI.items():
        assert row.setting or row.note, name
        assert not row.setting or row.setting in get_settings(), name


def test_the_defaults_are_flagais() -> None:
    values = flagai_settings.complete({"env_type": "pytorch", "epochs": 1})
    settings = resolve(flagai_settings.build_settings(values, {"env_type", "epochs"}))
    wanted = {
        "lr": 1e-3, "weight_decay": 0.1, "micro_batch_size": 1, "lr_warmup_fraction": 0.1,
        "lr_decay_style": "cosine", "min_lr": 1e-4, "seed": 1234, "save": "checkpoints",
        "save_interval": 1000, "eval_interval": 100, "log_interval": 100, "save_optim": False,
        "device": "cpu", "clip_grad": 1.0,
    }  # fmt: skip
    assert {name: getattr(settings, name) for name in wanted} == pytest.approx(wanted)


def test_the_cosine_follows_the_files_rate(tmp_path: Path) -> None:
    """FlagAI's own example file has another rate than the constructor beside it."""
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"lr": 5e-6, "weight_decay": 0.1}},
    }))  # fmt: skip
    given = {"env_type": "deepspeed", "deepspeed_config": str(file), "lr": 1e-4, "epochs": 1}
    values = flagai_settings.complete(given)
    settings = resolve(flagai_settings.build_settings(values, set(given)))
    assert (settings.lr, settings.min_lr) == pytest.approx((5e-6, 5e-7))


def test_the_error_of_a_full_disk_keeps_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    @in_words_of(FLAGAI)
    def save() -> None:
        raise WriteError("checkpoints", "disk full")

    with pytest.raises(WriteError, match="checkpoints cannot be written: disk full") as caught:
        save()
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (copied.target, copied.reason) == ("checkpoints", "disk full")


def test_an_error_is_in_flagais_words_and_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ConfigurationError, match="gradient_accumulation_steps must be") as caught:
        make_trainer(tmp_path, gradient_accumulation_steps=0).train(
            make_classifier(), train_dataset=make_rows()
        )
    assert "--" not in str(caught.value)
    sys.excepthook(caught.type, caught.value, caught.tb)
    shown = capsys.readouterr().err
    assert "Traceback" not in shown and shown.startswith(f"error: {__file__}, line ")
    hook = sys.excepthook
    with pytest.raises(ConfigurationError):
        make_trainer(tmp_path, gradient_accumulation_steps=0).train(
            make_classifier(), train_dataset=make_rows()
        )
    assert sys.excepthook is hook


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"env_type": "bmtrain"}, "env_type='bmtrain' must be one of pytorch, pytorchDDP"),
        ({"env_type": "deepspeed"}, "needs deepspeed_config='deepspeed.json'"),
        ({"env_type": "pytorch", "epoch": 1}, "no argument 'epoch': did you mean 'epochs'"),
        ({"env_type": "pytorch", "model_parallel_size": 2}, "needs env_type='deepspeed\\+mpu'"),
        ({"env_type": "deepspeed+mpu", "deepspeed_config": "x", "model_parallel_size": 2,
          "model_paralle_size": 4}, "are one value: give one"),
        ({"env_type": "pytorchDDP", "num_gpus": 2, "training_script": "nowhere.py"},
         "training_script='nowhere.py' is not a file: pass training_script=__file__"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_reported(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Trainer(**given)


def test_wrong_calls_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs the model first, got NoneType"):
        make_trainer(tmp_path).train(train_dataset=make_rows())
    with pytest.raises(ConfigurationError, match=r"train\(\) needs train_dataset"):
        make_trainer(tmp_path).train(make_classifier())

    class Forgets(Trainer):
        def forward_step(self, data: Any, model: Any, mems: Any) -> Any:
            return {"logits": model(**data).logits}

    with pytest.raises(RapidformerError, match="dictionary with 'loss', got logits"):
        make_trainer(tmp_path, cls=Forgets).train(
            make_classifier(), train_dataset=make_rows(), collate_fn=collate
        )
