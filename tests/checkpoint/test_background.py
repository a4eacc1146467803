"""Checkpoints that are written while training continues."""

from __future__ import annotations

import errno
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer.checkpoint import background as background_module
from rapidformer.checkpoint import saving as save_module
from rapidformer.checkpoint import writing
from rapidformer.checkpoint.background import BackgroundSave
from rapidformer.checkpoint.finding import find_checkpoints
from rapidformer.checkpoint.loading import load_checkpoint
from rapidformer.checkpoint.publish import read_manifest
from rapidformer.checkpoint.saving import prepare_save
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import WriteError
from rapidformer.host_memory import measure_free_memory
from rapidformer.log import configure_logging
from tests.processes import run_in_processes
from tests.training.test_templates import LineFinetuner, make_engine

from .run import Run, save_checkpoint


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds the writing back until it is set."""
    opened, write = threading.Event(), save_module.write_pieces

    def wait_and_write(*args: Any) -> Any:
        opened.wait()
        return write(*args)

    monkeypatch.setattr(save_module, "write_pieces", wait_and_write)
    return opened


def test_what_is_saved_is_the_state_of_its_step(tmp_path: Path, gate: threading.Event) -> None:
    run, background = Run(), BackgroundSave()
    run.train(3)
    gate.set()
    expected = read_manifest(save_checkpoint(tmp_path / "at-once", run.state, {}))
    gate.clear()
    background.start(prepare_save(tmp_path / "behind", run.state, {}))
    later = run.train(3)
    assert find_checkpoints(tmp_path / "behind") == [], "nothing is published yet"
    gate.set()
    save = background.finish()
    assert save is not None and background.finish() is None
    assert read_manifest(save.target) == expected, "every file, bit for bit"
    resumed = Run(seed=9)
    load_checkpoint(tmp_path / "behind", resumed.state)
    assert resumed.train(3) == later


def test_a_cancelled_save_leaves_the_last_checkpoint(tmp_path: Path, gate: threading.Event) -> None:
    run, background = Run(), BackgroundSave()
    gate.set()
    save_checkpoint(tmp_path, run.state, {})
    gate.clear()
    run.train(1)
    background.start(prepare_save(tmp_path, run.state, {}))
    background.cancel()
    gate.set()
    with pytest.raises(WriteError, match="the run was stopped"):
        background.finish()
    assert [path.name for path in find_checkpoints(tmp_path)] == ["iter_0000000"]


def train(folder: Path, **settings: Any) -> LineFinetuner:
    values = {"epochs": 1, "save": str(folder), "save_interval": 4, "seed": 1, **settings}
    trainer = LineFinetuner(make_engine(**values))
    trainer.train()
    return trainer


def test_a_run_saves_the_same_in_the_background(tmp_path: Path) -> None:
    train(tmp_path / "off", async_save="off")
    train(tmp_path / "on", async_save="on")
    names = [path.name for path in find_checkpoints(tmp_path / "off")]
    assert [path.name for path in find_checkpoints(tmp_path / "on")] == names
    for name in names:
        on, off = (read_manifest(tmp_path / kind / name) for kind in ("on", "off"))
        assert on["state/__0_0.distcp"] == off["state/__0_0.distcp"]
    lines = (tmp_path / "on" / "metrics.jsonl").read_text().splitlines()
    saves = [line for line in map(json.loads, lines) if "save_stall_s" in line]
    assert [line["step"] for line in saves] == [int(name[5:]) for name in names[:-1]]
    assert all(line["save_write_s"] > 0 for line in saves)


def test_training_waits_for_a_save_if_host_memory_has_no_room_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    needed = sum(piece.data.nbytes for piece in prepare_save(tmp_path, run.state, {}).pieces)
    for ranks, free, has_room in ((1, 2 * needed + 1, True), (2, 4 * needed, False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setattr(background_module, "measure_free_memory", lambda free=free: free)
        assert BackgroundSave().has_room(prepare_save(tmp_path, run.state, {}).pieces) is has_room
    monkeypatch.setattr("rapidformer.engine.checkpoints.SMALLEST_BYTES", 0)
    for free, is_behind in ((0.0, False), (math.inf, True)):
        monkeypatch.setattr(background_module, "measure_free_memory", lambda free=free: free)
        folder = tmp_path / str(free)
        train(folder, async_save="auto")
        assert ("save_write_s" in (folder / "metrics.jsonl").read_text()) is is_behind


def test_free_memory_is_what_the_system_and_the_container_leave(tmp_path: Path) -> None:
    system = tmp_path / "meminfo"
    assert measure_free_memory(system, tmp_path) == math.inf
    system.write_text("MemTotal: 900 kB\nMemAvailable: 600 kB\n")
    assert measure_free_memory(system, tmp_path) == 600 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("4000\n")
    assert measure_free_memory(system, tmp_path) == 600 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 3500\ninactive_file 500\n")
    assert measure_free_memory(system, tmp_path) == 1500


@pytest.mark.parametrize("async_save", ["on", "off"])
def test_a_failed_write_is_reported_and_training_continues(
    async_save: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = save_module.publish

    def publish(target: Path, **options: Any) -> None:
        if target.name == "iter_0000004":
            raise OSError(errno.ENOSPC, "No space left on device")
        before(target, **options)

    monkeypatch.setattr(save_module, "publish", publish)
    train(tmp_path, async_save=async_save, log_level="warning")
    text = "the checkpoint of step 4 was not saved: No space left on device. Training continues"
    assert text in capsys.readouterr().err
    names = [path.name for path in find_checkpoints(tmp_path)]
    assert names == ["iter_0000008", "iter_0000010"]


def test_a_disk_that_will_not_hold_the_next_save_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=10))
    monkeypatch.setattr(writing, "shutil", disk)
    configure_logging("warning")
    save_checkpoint(tmp_path, Run().state, {})
    assert "the next checkpoint needs about" in capsys.readouterr().err


def _save_and_train(folder: Path) -> None:
    """Save twice at one step: at once, and while the next update runs."""
    engine = RapidformerEngine(
        args={
            "lr": 0.01, "global_batch_size": 4, "micro_batch_size": 2, "log_level": "error",
            "zero_3_memory_optimization": True, "async_save": "on",
        }
    )  # fmt: skip
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    rows = [{"input_ids": [i, i + 1, i + 2], "labels": [i, i + 1, i + 2]} for i in range(28)]
    loader = engine.data.build_loader(rows, is_training=True)
    (model, *_) = engine.compose(GPT2LMHeadModel(config))
    updates = engine.data.iterate_updates(loader)

    def train() -> None:
        engine.run_update(lambda batch: model(**batch).loss, next(updates))
        engine.step()

    train()
    engine.save_checkpoint(folder / "at-once")
    opened, write = threading.Event(), save_module.write_pieces

    def wait_and_write(*args: Any) -> Any:
        opened.wait()
        return write(*args)

    save_module.write_pieces = wait_and_write
    target = engine.save_checkpoint(folder / "behind", wait=False)
    assert engine.checkpoints.background.save is not None
    train()
    assert not target.exists()
    opened.set()
    engine.checkpoints.wait_for_save()
    assert target.is_dir()
    engine.close()


def test_shards_of_two_ranks_are_those_of_their_step(tmp_path: Path) -> None:
    run_in_processes(_save_and_train, 2, tmp_path)
    behind, at_once = (
        read_manifest(tmp_path / name / "iter_0000001") for name in ("behind", "at-once")
    )
    assert {"state/__0_0.distcp", "state/__1_0.distcp"} <= set(behind)
    assert behind == at_once
