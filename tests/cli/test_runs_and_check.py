"""``rapidformer runs`` and ``rapidformer check``: what is in a folder, and whether it is intact."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidformer.checkpoint.inspection import inspect_model
from rapidformer.checkpoint.inventory import read_metrics, take_inventory
from rapidformer.checkpoint.lock import FolderLock
from rapidformer.checkpoint.publish import publish, start_staging
from rapidformer.cli.runs import draw, list_rows
from tests.training.test_templates import LineFinetuner, make_engine

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("original") / "run"
    engine = make_engine(epochs=2, save=str(folder), log_interval=5, optimizer="adam")
    LineFinetuner(engine).train()
    engine.checkpoints.release_folder()
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "all" / "run"))


def read(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- runs ----------------------------------------------------------------------------------------


def test_runs_lists_steps_losses_sizes_and_states(command: Command, run: Path) -> None:
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in logged if "loss" in line}
    errors = {line["step"]: line["eval_error"] for line in logged if "eval_error" in line}
    found = read(command("runs", run.parent, "--json"))
    assert found["verified"] is False
    (entry,) = found["runs"]
    assert (entry["state"], entry["step"], entry["loss"]) == ("complete", 20, losses[20])
    best = min(errors, key=lambda step: errors[step])
    assert entry["best"] == {"metric": "error", "value": errors[best], "step": best}
    assert [checkpoint["step"] for checkpoint in entry["checkpoints"]] == [20, 10]
    for checkpoint in entry["checkpoints"]:
        files = [path for path in Path(checkpoint["path"]).rglob("*") if path.is_file()]
        assert checkpoint["bytes"] == sum(path.stat().st_size for path in files)
        assert checkpoint["loss"] == losses[checkpoint["step"]]
        assert checkpoint["metrics"]["error"] == errors[checkpoint["step"]]
        assert checkpoint["state"] == "complete" and checkpoint["age_seconds"] >= 0
    shown = command("runs", run.parent).stdout
    assert "iter_0000020" in shown and f"best error {errors[best]:.4f}" in shown
    assert "Only sizes were compared: `rapidformer check` verifies the contents." in shown
    single = read(command("runs", run / "iter_0000010", "--json"))
    assert single["runs"] == [] and single["checkpoints"][0]["loss"] == losses[10]


def test_runs_sees_what_is_running_killed_damaged_and_left_behind(
    command: Command, run: Path
) -> None:
    def get_states() -> dict[str, str]:
        (entry,) = read(command("runs", run, "--json"))["runs"]
        names = {Path(each["path"]).name: each["state"] for each in entry["checkpoints"]}
        return {"run": entry["state"], **names}

    shutil.copytree(run / "iter_0000010", start_staging(run / "iter_0000030"), dirs_exist_ok=True)
    staged = ".rapidformer-staging-iter_0000030"
    lock = FolderLock(run)
    lock.acquire()
    complete = {"iter_0000020": "complete", "iter_0000010": "complete"}
    assert get_states() == {"run": "running", staged: "in progress", **complete}
    holder = json.loads((run / ".lock").read_text())
    lock.release()
    assert get_states() == {"run": "complete", staged: "abandoned", **complete}
    (run / ".lock").write_text(json.dumps({**holder, "started": "another process"}))
    assert get_states()["run"] == "killed"
    (run / ".abandoned").mkdir()
    (run / "iter_0000020").rename(run / ".abandoned" / "iter_0000020")
    assert get_states()["iter_0000020"] == "abandoned"
    (run / "iter_0000010" / "run.json").write_text("{}")
    states = get_states()
    assert states["run"] == states["iter_0000010"] == "damaged"
    shown = command("runs", run).stdout
    assert "run.json has 2 bytes, " in shown and "its save was interrupted" in shown


def test_runs_with_very_many_checkpoints_shows_the_newest(command: Command, run: Path) -> None:
    for step in range(21, 141):
        (run / f"iter_{step:07d}").mkdir()
        (run / f"iter_{step:07d}" / "manifest.json").write_text('{"files": {}}')
    shutil.copytree(run / "best", run.parent / "model")
    shutil.copytree(run, run.parent / "deep" / "other", copy_function=os.link)
    shown = command("runs", run.parent).stdout.splitlines()
    names = [line.split()[0] for line in shown if line]
    assert names.count("iter_0000140") == 2 and "iter_0000137" not in names
    assert sum("and 119 more" in line and "117 damaged" in line for line in shown) == 2
    everything = command("runs", run.parent, "--all").stdout
    assert everything.count("iter_0000137") >= 2


def test_runs_fits_the_terminal(run: Path) -> None:
    name = "sequence_classification-bert-base-cased-2026-11-16_15-58-12"
    run.rename(run.parent / name)
    rows = list_rows(take_inventory(run.parent), shows_all=True)
    wide, narrow = ([line.plain for line in draw("run", rows, width)] for width in (200, 80))
    assert len(narrow) == len(wide) + 1 and max(map(len, narrow)) <= 80
    assert wide[2].split() == [name, *narrow[3].split()] and narrow[2] == name
    longer = replace(rows[0], cells={**rows[0].cells, "metric": "best matthews_correlation 0.5"})
    lines = [line.plain for line in draw("run", [longer, *rows[1:]], 80)]
    assert max(map(len, lines)) <= 80 and lines[0].split()[-3:] == ["metric", "age", "state"]


def test_runs_takes_any_folder(command: Command, run: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    (empty / "iter_0000010" / "mp_rank_00").mkdir(parents=True)  # Megatron's own
    (empty / "back").symlink_to(tmp_path)
    (run.parent.rename(tmp_path / "moved"))
    done = command("runs", empty / "iter_0000010")
    assert (done.returncode, done.stdout) == (0, f"no runs in {empty / 'iter_0000010'}\n")
    (entry,) = read(command("runs", empty, "--json"))["runs"]
    assert entry["path"].endswith("back/moved/run"), "links are followed, but not in circles"
    done = command("runs", tmp_path / "mooved")
    assert done.returncode == 1
    assert "does not exist. Did you mean" in done.stderr and "/moved?" in done.stderr
    done = command("runs", tmp_path / "moved" / "run" / "metrics.jsonl")
    assert done.returncode == 1 and "is a file" in done.stderr


def test_runs_reads_neither_pipes_nor_nonsense(command: Command, run: Path) -> None:
    for name in ("metrics.jsonl", ".run.json", ".lock", "iter_0000020/manifest.json"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    (run / "iter_0000010" / "manifest.json").write_text('{"files": {"\\u0000": {"size": 1}}}')
    (entry,) = read(command("runs", run.parent, "--json"))["runs"]
    assert entry["state"] == "damaged" and entry["loss"] is None and entry["best"] is None
    assert [each["state"] for each in entry["checkpoints"]] == ["damaged", "damaged"]


def test_losses_are_those_of_each_step(tmp_path: Path) -> None:
    lines = [
        '{"step": 2, "loss": 0.5}', '{"step": 4, "loss": null}', "nonsense", '{"step": 5, "loss"',
        '{"step": 6, "loss": 0.25}', '{"step": 6, "eval_loss": 0.75, "eval_name": "x"}',
        '{"step": 9, "loss": 0.125}', '{"step": 1',
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found = read_metrics(tmp_path / "metrics.jsonl", [1, 3, 4, 8, 20])
    assert (found.step, found.loss) == (9, 0.125)
    assert found.losses == {3: 0.5, 8: 0.25, 20: 0.125}
    assert found.evaluations == {6: {"loss": 0.75}}


def test_runs_does_not_import_torch(run: Path) -> None:
    code = (
        "import sys; from rapidformer.cli.main import main; main(sys.argv[1:]);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'transformers')))"
    )
    words = [sys.executable, "-c", code, "runs", str(run)]
    assert subprocess.run(words, check=False, capture_output=True).returncode == 0


# ---- check ---------------------------------------------------------------------------------------


def test_check_verifies_a_checkpoint_and_a_run(command: Command, run: Path) -> None:
    done = command("check", run / "iter_0000010")
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith(f"{run / 'iter_0000010'}: complete (")
    (run / "iter_0000020" / "notes.txt").write_text("mine")
    done = command("check", run, "--finite")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        str(run / name) for name in ("iter_0000010", "iter_0000020", "iter_0000020", "best", "last")
    ]
    assert "not checked: notes.txt (not in the manifest)" in lines[1]
    assert "verified" in lines[2] and lines[3].endswith("not verified: it has no hashes")


def test_check_prints_each_problem(command: Command, run: Path) -> None:
    folder = run / "iter_0000020"
    (state,) = folder.glob("state/*.distcp")
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    (folder / "random-00000.json").unlink()
    os.mkfifo(folder / "random-00000.json")
    done = command("check", run)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(str(folder))]
    assert lines == [
        f"{folder}: random-00000.json is missing (it is not a regular file)",
        f"{folder}: state/{state.name} is not what was written",
        f"{folder}: damaged (2 problems)",
    ]


def forge(folder: Path, change: Callable[[Path], None]) -> None:
    """Change a checkpoint, and give it a manifest whose hashes are right."""
    staging = start_staging(folder)
    staging.rmdir()
    folder.rename(staging)
    (staging / "manifest.json").unlink()
    change(staging)
    publish(folder)


def change_index(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "state" / "index.json"
        content = json.loads(path.read_text())
        change(content["tensors"])
        path.write_text(json.dumps(content))

    return apply


def widen(tensors: Any) -> None:
    tensors["model.layer.weight"]["shape"] = [7, 1]


def move_all(tensors: Any) -> None:
    for entry in tensors.values():
        entry["parts"][0][3] += 1 << 40


def shorten(tensors: Any) -> None:
    tensors["model.layer.weight"]["parts"][0][4] = 3


def misshape(tensors: Any) -> None:
    entry = tensors["optimizer.layer.weight.exp_avg"]
    entry["shape"], entry["parts"][0][:2] = [1], [[0], [1]]


def remove_indexes(folder: Path) -> None:
    for name in ("index.json", ".metadata"):
        (folder / "state" / name).unlink()


def change_run(**values: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(content | values))

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_index(widen), "its parts do not make up the whole of model.layer.weight"),
        (change_index(move_all), "refers to bytes that "),
        (change_index(shorten), "a part of model.layer.weight has 3 bytes, too few for [1, 1]"),
        (
            change_index(misshape),
            "optimizer.layer.weight.exp_avg has shape [1], the weight has [1, 1]",
        ),
        (change_run(layout={"data": 2}), "manifest.json does not list random-00001.json"),
        (
            change_run(param_groups=[{"params": ["layer.gone"]}]),
            "the optimizer trains layer.gone, which is not among the tensors",
        ),
        (change_run(step="seven"), "step is missing or malformed"),
        (remove_indexes, "does not list state/index.json"),
        (lambda folder: (folder / "state" / "index.json").write_text("x"), "unreadable"),
    ],
)  # fmt: skip
def test_check_looks_inside(
    change: Callable[[Path], None], message: str, command: Command, run: Path
) -> None:
    forge(run / "iter_0000010", change)
    done = command("check", run / "iter_0000010")
    assert done.returncode == 1 and done.stderr == ""
    assert message in done.stdout


@pytest.mark.parametrize("text", ['{"model_type": "be', "[" * 100_000])
def test_check_reads_the_json_of_a_model(text: str, command: Command, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    done = command("check", tmp_path)
    assert done.returncode == 1 and "config.json is not valid JSON (" in done.stdout


def test_a_json_file_that_cannot_be_read(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    problems = list(inspect_model(tmp_path, lambda count: None, finite=False))
    assert problems == ["config.json cannot be read: Permission denied"]


def test_check_finite_finds_the_tensor(command: Command, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = {"a": torch.tensor([1.0, float("nan"), float("inf")]), "b": torch.ones(2)}
    (tmp_path / "model").mkdir()
    save_file(weights, tmp_path / "model" / "model.safetensors")
    assert command("check", tmp_path / "model").returncode == 0
    done = command("check", tmp_path / "model", "--finite")
    assert done.returncode == 1
    assert "a has 2 of 3 values that are NaN or infinite" in done.stdout


def test_check_finite_reads_a_checkpoint(command: Command, run: Path) -> None:
    def spoil(folder: Path) -> None:
        (state,) = folder.glob("state/*.distcp")
        place = pickle.loads((folder / "state" / ".metadata").read_bytes()).storage_data
        weight = next(value for name, value in place.items() if name.fqn == "model.layer.weight")
        buffer = state.read_bytes()
        part = buffer[weight.offset : weight.offset + weight.length]
        value = torch.load(io.BytesIO(part)).numpy().tobytes()
        assert part.count(value) == 1
        spoiled = part.replace(value, torch.tensor(float("nan")).numpy().tobytes())
        end = weight.offset + weight.length
        state.write_bytes(buffer[: weight.offset] + spoiled + buffer[end:])

    forge(run / "iter_0000010", spoil)
    assert command("check", run / "iter_0000010").returncode == 0, "its hashes are right"
    done = command("check", run / "iter_0000010", "--finite")
    assert done.returncode == 1
    assert "model.layer.weight has 1 of 1 values that are NaN or infinite" in done.stdout


def test_before_the_first_run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAPIDFORMER_RUNS", raising=False)
    done = command("runs")
    assert "the folder runs does not exist. Runs are kept there by default" in done.stderr


def test_check_refuses_what_it_cannot_check(command: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = command("check", tmp_path / "empty")
    assert done.returncode == 1 and "neither a checkpoint nor a run nor a model" in done.stderr
    (tmp_path / "empty" / "x.safetensors").write_bytes(b"\xff" * 9)
    done = command("check", tmp_path / "empty")
    assert done.returncode == 1 and "x.safetensors cannot be read" in done.stdout
    done = command("check", tmp_path / "emtpy")
    assert done.returncode == 1 and "does not exist. Did you mean" in done.stderr
