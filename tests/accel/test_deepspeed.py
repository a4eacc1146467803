"""DeepSpeed behind the engine's verbs: what it is given, what it refuses, what stays the user's."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.errors import ConfigurationError, MissingPackageError, TrainingError
from tests.processes import run_in_processes
from tests.test_process_state import (
    ALLOWED,
    BUILDERS,
    DISTRIBUTED,
    find_patches,
    list_changes,
    look,
)

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {"micro_batch_size": 4, "lr": 0.1, "seed": 3}


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(3, 5)
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        prediction = self.last(torch.tanh(self.first(x))).squeeze(-1)
        return {"loss": ((prediction - labels) ** 2).mean(), "prediction": prediction}


def build_rows() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [{"x": x, "labels": x.sum()} for x in torch.rand(32, 3)]


class LineTrainer(Finetuner):
    best_metric = "distance"
    greater_is_better = False

    def train_valid_test_datasets_provider(self) -> Any:
        return build_rows(), build_rows()[:7], None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        return Line(), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch)["loss"]

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> dict[str, float]:
        losses = [self.gather(model[0](**b)["loss"].reshape(1)) for b in eval_dataloader]
        return {"distance": float(torch.cat(losses).mean())}


def write(folder: Path, content: dict[str, Any], name: str = "ds.json") -> str:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return str(folder / name)


def test_a_missing_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    engine = RapidformerEngine(args={**SETTINGS, "deepspeed": write(tmp_path, {})})
    with pytest.raises(MissingPackageError, match=r"pip install 'rapidformer\[deepspeed\]'"):
        engine.compose(Line())


def is_installed() -> bool:
    """Imported here, so that the processes forked from this one have it already."""
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        return False
    return True


needs_package = pytest.mark.skipif(
    not is_installed(), reason="the extra rapidformer[deepspeed] is not installed"
)


def compose(
    folder: Path, content: dict[str, Any], *objects: Any, **settings: Any
) -> RapidformerEngine:
    engine = RapidformerEngine(
        args={**SETTINGS, **settings, "deepspeed": write(folder, content, f"{id(content)}.json")}
    )
    model = Line()
    made = [make(model) if callable(make) else make for make in objects]
    engine.compose(model, *made)
    return engine


def step(engine: RapidformerEngine, rows: slice = slice(0, 4)) -> float:
    batch = {k: torch.stack([r[k] for r in build_rows()[rows]]) for k in ("x", "labels")}
    assert engine.model.module is not None
    loss = engine.model.module(**batch)["loss"]
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def get_refusal(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (ConfigurationError, TrainingError) as reason:
        return str(reason)
    return "accepted"


def run_alone(folder: Path) -> dict[str, Any]:
    """What one process can show; in a process of its own, since DeepSpeed leaves traces."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    stage_1 = {"zero_optimization": {"stage": 1}}

    def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def make_adafactor(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.1)

    before = look()
    closed = compose(folder, stage_1)
    step(closed)
    closed.close()
    changes = list_changes(before, look()) + find_patches()
    stays = tuple(ALLOWED | BUILDERS | DISTRIBUTED)
    found["left changed"] = [change for change in changes if not change.startswith(stays)]

    found["two optimizers"] = get_refusal(compose, folder, adamw, make_sgd)
    found["whole matrices"] = get_refusal(compose, folder, stage_1, make_adafactor)
    found["unknown key"] = get_refusal(
        compose, folder, {"zero_optimization": {"stage": 1, "stag": 2}}
    )
    found["unknown schedule"] = get_refusal(compose, folder, {"scheduler": {"type": "Sawtooth"}})

    half = compose(folder, {"bf16": {"enabled": True}, **stage_1})
    losses = [step(half) for _ in range(6)]
    assert half.model is not None
    found["bf16"] = {
        "losses": losses,
        "weights": {str(p.dtype) for p in half.model.parameters},
        "saved": {
            str(t.dtype)
            for t in half.model.parallelized.deepspeed.state.collect(with_optimizer=True)[
                0
            ].values()
        },
    }

    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}
    warm = compose(folder, {**stage_1, **schedule})
    found["rates"] = []
    for _ in range(6):
        found["rates"].append(warm.updates.get_learning_rate())
        step(warm)

    own = {
        **stage_1,
        "optimizer": {"type": "RMSprop", "params": {"lr": "auto", "alpha": 0.9}},
        "zero_allow_untested_optimizer": True,
    }
    theirs = compose(folder, own, lr=0.01)
    found["their optimizer"] = (type(theirs.updates.optimizer).__name__, step(theirs), step(theirs))

    for stage in (0, 2, 3):
        engine = compose(
            folder, {"zero_optimization": {"stage": stage}}, make_sgd, global_batch_size=8
        )
        model = engine.model.module
        assert model is not None
        before = step(engine)
        norm_inside = engine.clip_grad_norm()
        step(engine, slice(4, 8))
        batch = {k: torch.stack([r[k] for r in build_rows()[:4]]) for k in ("x", "labels")}
        engine.backward(model(**batch)["loss"])
        engine.backward(model(**batch)["loss"])
        norm = engine.clip_grad_norm(1e-3)
        engine.step()
        found[f"stage {stage}"] = (before, norm_inside, float(norm), step(engine))
        engine.backward(model(**batch)["loss"] * math.nan)
        found[f"nan {stage}"] = get_refusal(engine.step)
        found[f"fp16 {stage}"] = overflow(folder, {"zero_optimization": {"stage": stage}})
    return found


def overflow(folder: Path, content: dict[str, Any]) -> list[float]:
    """Losses around an update whose gradient fp16 cannot hold, and the updates done."""
    engine = compose(folder, content, fp16=True, initial_loss_scale=16.0)
    assert engine.updates.scaler is not None
    losses = [step(engine)]
    engine.updates.scaler.scale = 1e38
    losses += [step(engine)]
    engine.updates.scaler.scale = 16.0
    losses += [step(engine), step(engine)]
    return [*losses, engine.updates.clock.updates, engine.updates.clock.skipped]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    alone: dict[str, Any] = run_in_processes(run_alone, 1, tmp_path_factory.mktemp("alone"))[0]
    return alone


@needs_package
def test_an_optimizer_in_two_places_is_refused(found: dict[str, Any]) -> None:
    assert "compose() got an optimizer" in found["two optimizers"]
    assert "has a section `optimizer`" in found["two optimizers"]


@needs_package
def test_an_optimizer_that_needs_whole_matrices_is_refused(found: dict[str, Any]) -> None:
    assert "Adafactor may not support: use AdamW or SGD, or stage 0" in found["whole matrices"]


@needs_package
def test_what_deepspeed_refuses_is_reported_in_one_line(found: dict[str, Any]) -> None:
    assert found["unknown key"].startswith("DeepSpeed rejects")
    assert "stag" in found["unknown key"] and "\n" not in found["unknown key"]
    assert "scheduler.type Sawtooth" in found["unknown schedule"]


@needs_package
def test_a_bf16_section_keeps_16_bit_weights_and_saves_32_bit_ones(found: dict[str, Any]) -> None:
    assert found["bf16"]["weights"] == {"torch.bfloat16"}
    assert found["bf16"]["saved"] == {"torch.float32"}
    assert found["bf16"]["losses"][-1] < found["bf16"]["losses"][0]


@needs_package
def test_the_files_schedule_is_followed(found: dict[str, Any]) -> None:
    """DeepSpeed's own arithmetic: the rate of update n is that of its step n - 1."""
    expected = [0.0, 0.0, 0.1 * math.log(2) / math.log(3), 0.1, 0.1, 0.1]
    assert found["rates"] == pytest.approx(expected)


@needs_package
def test_a_closed_engine_leaves_the_process_as_it_was(found: dict[str, Any]) -> None:
    """Its logger, a filter of warnings, a variable and a table of DeepSpeed's stayed changed."""
    assert not found["left changed"]


@needs_package
def test_an_optimizer_that_is_not_ours_is_made_by_deepspeed(found: dict[str, Any]) -> None:
    name, first, second = found["their optimizer"]
    assert name == "RMSprop" and second < first


@needs_package
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_accumulation_and_clipping_by_hand_are_the_engines(
    stage: int, found: dict[str, Any]
) -> None:
    """Two micro-batches make an update, each of the weight that it has in the bare loop.

    (A loss that is the model's own output, as it is here, DeepSpeed would divide once more.)
    """
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = build_rows()
    batches = [{k: torch.stack([r[k] for r in part]) for k in ("x", "labels")}
               for part in (rows[:8], rows[:4])]  # fmt: skip
    losses = [float(model(**batches[1])["loss"].detach())]
    # The script has its own optimizer: its first update is not clipped.
    for batch, clip in ((batches[0], math.inf), (batches[1], 1e-3)):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
    losses.append(float(model(**batches[1])["loss"].detach()))
    before, norm_inside, mine, after = found[f"stage {stage}"]
    assert norm_inside is None
    assert (before, after) == pytest.approx(losses, rel=1e-5)
    assert mine == pytest.approx(norm, rel=1e-5)


@needs_package
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_that_is_not_finite_stops_the_run(stage: int, found: dict[str, Any]) -> None:
    assert "is not finite" in found[f"nan {stage}"]


@needs_package
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_overflow_of_fp16_skips_one_update(stage: int, found: dict[str, Any]) -> None:
    first, second, third, fourth, updates, skipped = found[f"fp16 {stage}"]
    assert (updates, skipped) == (3, 1)
    assert second == third and fourth < third < first


def train_template(folder: Path) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    results = []
    file = write(folder, {"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0})
    run = folder / "run"
    for epochs in (1, 2):
        args = {**SETTINGS, "deepspeed": file, "epochs": epochs, "save": str(run)}
        if epochs == 2:
            args["load"] = str(run)
        trainer = LineTrainer(RapidformerEngine(args=args))
        results.append(trainer.train())
    return results


@needs_package
def test_a_template_trains_evaluates_saves_and_resumes(tmp_path: Path) -> None:
    first, second = run_in_processes(train_template, 2, tmp_path)[0]
    assert second["distance"] < first["distance"]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_distance" in line] == [4, 8]
    assert (tmp_path / "run/best").is_dir() and (tmp_path / "run/last").is_dir()


@needs_package
def test_a_lock_left_by_a_killed_build_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Waiting for it in silence is how a run used to hang for ever."""
    from rapidformer.accel.deepspeed.package import announce_build
    from rapidformer.log import get_logger

    (tmp_path / "fused_adam").mkdir()
    (tmp_path / "fused_adam/lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(get_logger(), "propagate", True)
    announce_build()
    assert "fused_adam/lock" in caplog.text and "delete that file" in caplog.text
