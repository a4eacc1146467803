"""A full or vanished disk and exhausted memory: one sentence each, and nothing saved is lost."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from rapidformer.checkpoint import saving, writing
from rapidformer.checkpoint.finding import find_checkpoints
from rapidformer.cli.main import describe_exhaustion
from rapidformer.errors import CheckpointError, ModelError
from rapidformer.log import configure_logging
from rapidformer.training.trackers import MetricsFile, TrackedRun
from tests.training.test_templates import LineFinetuner, make_engine


def train(folder: Path, **settings: Any) -> None:
    values = {"epochs": 1, "save": str(folder), "save_interval": 4, **settings}
    LineFinetuner(make_engine(**values)).train()


def fail_at(step: int, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the checkpoint of this step meet an error of the file system."""
    before = saving.publish

    def publish(target: Path, **options: Any) -> None:
        if target.name == f"iter_{step:07d}":
            raise error
        before(target, **options)

    monkeypatch.setattr(saving, "publish", publish)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded"),
        (
            SafetensorError("Error while serializing: I/O error: No space left (os error 28)"),
            r"No space left \(os error 28\)",
        ),
    ],
    ids=["space", "read-only", "quota", "safetensors"],
)
def test_a_disk_that_cannot_be_written_to(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(10, monkeypatch, error)  # the last one: earlier ones only cost a warning
    with pytest.raises(CheckpointError, match=f"{tmp_path} cannot be written: {reason}. What was"):
        train(tmp_path)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["iter_0000004", "iter_0000008"]
    monkeypatch.undo()
    train(tmp_path, load=str(tmp_path))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".staging")]


def test_a_wrong_metric_does_not_claim_a_checkpoint_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the checkpoint to resume from, so a background save must be complete."""
    fail_at(10, monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(CheckpointError, match=r"No space left on device\. What was"):
        train(tmp_path, metric_for_best_model="acuracy", async_save="on")


def test_a_disk_without_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(10, monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    full = SimpleNamespace(f_files=9, f_favail=0, f_bavail=1, f_bfree=1, f_blocks=9, f_frsize=2**40)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(CheckpointError, match="the disk has room, but no inodes"):
        train(tmp_path)


def test_a_folder_that_vanishes_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saving.get_random_states

    def vanish(device: Any) -> Any:
        # In one move: something else may write to the folder while its files are deleted.
        (tmp_path / "run").rename(tempfile.mkdtemp(dir=tmp_path))
        return before(device)

    monkeypatch.setattr(saving, "get_random_states", vanish)
    with pytest.raises(CheckpointError, match="the folder has vanished"):
        train(tmp_path / "run")


@pytest.mark.parametrize("folder", ["/proc/run", "/dev/null/run"])
def test_a_folder_that_cannot_exist(folder: str) -> None:
    with pytest.raises(CheckpointError, match=f"the folder {folder} cannot be written to: "):
        train(Path(folder))


def test_metrics_that_cannot_be_written_are_written_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = MetricsFile()
    file.start(TrackedRun(folder=tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    configure_logging("warning")
    file.log({}, 1)
    assert "metrics.jsonl cannot be written: No such file" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    file.log({}, 2)
    assert file.path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_rollback_while_metrics_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of the steps that are repeated go, from the file and from what waits for the disk."""
    file = MetricsFile()
    file.start(TrackedRun(folder=tmp_path))
    for step in (1, 2, 3):
        file.log({}, step)
    with monkeypatch.context() as failing:
        failing.setattr("rapidformer.training.trackers.metrics_file._append", fail)
        failing.setattr("rapidformer.training.trackers.metrics_file.replace_text", fail)
        file.log({}, 4)
        file.drop_after(2)
        file.log({"loss": 0.5}, 3)
    file.finish()
    assert file.path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "loss": 0.5}\n'


def fail(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_fails_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapidformer.training.report.replace_text", fail)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left on device\."):
        train(tmp_path)


def test_what_rank_0_cannot_export_reaches_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only errors of the disk: otherwise they would wait for a rank that is gone."""
    sent: list[Any] = []

    def broadcast(problem: Any) -> Any:
        sent.append(problem)
        return problem

    def refuse() -> None:
        raise ModelError("the base model was edited")

    monkeypatch.setattr(writing, "broadcast_object", broadcast)
    with pytest.raises(ModelError, match="edited"):
        writing.run_on_first(refuse, tmp_path)
    assert len(sent) == 1


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "host memory ran out. To fit, use a smaller --micro-batch-size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes."),
         "host memory ran out: DefaultCPUAllocator"),
        (OutOfMemoryError("CUDA out of memory. Tried 2 GiB. Of the allocated memory 1 GiB is ..."),
         "GPU memory ran out: CUDA out of memory. Tried 2 GiB. To fit, use a smaller"),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."),
         "GPU memory ran out: CUDA error: out of memory. To fit, use a smaller"),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
         "GPU memory ran out: cuFFT error: CUFFT_ALLOC_FAILED. To fit, use a smaller"),
        (OSError(errno.ENOSPC, "No space left on device", "a.txt"),
         "No space left on device (a.txt): free some space"),
        (ValueError("a bug"), None),
        (FileNotFoundError(errno.ENOENT, "No such file"), None),
    ],
)  # fmt: skip
def test_what_ran_out_is_said_in_one_sentence(error: Exception, sentence: str | None) -> None:
    found = describe_exhaustion(error)
    assert (found is None) == (sentence is None)
    assert found is None or (found.startswith(str(sentence)) and "\n" not in found)


def test_a_script_that_runs_out_of_memory_shows_no_traceback(command: Any, tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("raise MemoryError")
    done = command("--user-script", tmp_path / "large.py")
    assert done.returncode == 1
    assert done.stderr.count("error: host memory ran out") == 1
    assert "Traceback" not in done.stderr
