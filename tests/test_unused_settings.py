"""Settings that a script of the user's own leaves without effect are named, once."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from rapidformer import RapidformerEngine

GIVEN = {
    "lr": 0.1, "weight_decay": 0.2, "lr_warmup_iters": 3, "epochs": 2, "micro_batch_size": 4,
    "eval_interval": 7,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test acts as a script that reads no setting: pytest's workers have no file at all."""
    script = str(tmp_path / "script.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)


def compose(capsys: pytest.CaptureFixture[str], *parts: Any, **more: Any) -> list[str]:
    """What compose() says of settings without effect."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if "optimizer" in parts else None
    if "loader" in parts:
        more["train_dataloader"] = DataLoader([1.0] * 8, batch_size=2)  # type: ignore[arg-type]
    RapidformerEngine(args={**GIVEN, "log_level": "warning"}).compose(model, optimizer, **more)
    lines = capsys.readouterr().err.splitlines()
    return [line.removeprefix("warning: ") for line in lines if "no effect here" in line]


def test_only_the_loops_settings_are_idle_where_the_flags_make_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert compose(capsys) == ["no effect here: --eval-interval (your script has its own loop)."]


def test_everything_without_effect_is_named_in_one_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = compose(
        capsys, "optimizer", "loader", lr_scheduler_fn=lambda opt: ConstantLR(opt, factor=1.0)
    )
    assert said == [
        "no effect here: --lr, --weight-decay (your script has its own optimizer); "
        "--lr-warmup-iters (your script has its own schedule); "
        "--micro-batch-size (your script has its own DataLoader); "
        "--eval-interval, --epochs (your script has its own loop)."
    ]


def test_a_schedule_that_gets_its_length_from_the_flags_uses_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    schedule = partial(get_linear_schedule_with_warmup, num_warmup_steps=0, num_training_steps=None)
    (said,) = compose(capsys, "loader", lr_scheduler_fn=schedule)
    assert "--lr-warmup-iters" in said and "--epochs" not in said


def test_a_notebook_gets_no_warning_since_its_cells_cannot_be_searched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert compose(capsys, "optimizer") == []


def test_a_setting_that_the_script_reads_is_not_named(python: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from rapidformer import RapidformerEngine\n"
        "engine = RapidformerEngine()\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=engine.args.lr, weight_decay=0.5)\n"
        "engine.compose(model, optimizer)\n"
        "for _ in range(getattr(engine.args, 'epochs')): pass\n"
    )
    flags = ["--lr", "0.1", "--weight-decay", "0.2", "--epochs", "1", "--eval-interval", "2"]
    done = subprocess.run([python, str(script), *flags], capture_output=True, text=True, check=True)
    (said,) = [line for line in done.stderr.splitlines() if "no effect here" in line]
    assert said.endswith(
        "no effect here: --weight-decay (your script has its own optimizer); "
        "--eval-interval (your script has its own loop)."
    )
