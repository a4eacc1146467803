"""The real wandb, MLflow and Trackio, without a network: killed, resumed, and read back.

    pip install 'rapidformer[trackers,tensorboard]'
    python -m tests.borrowed.trackers [FOLDER]

A small run reports to all of them, is killed (SIGKILL) between two checkpoints and resumed. Each
tracker's own reader must then find one run with every point of ``metrics.jsonl`` at its step, and
the numbers must be those of a run that reports to nobody and is never killed.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.small import make_model_folder, make_pair_data

STEPS, SAVED_EVERY, KILLED_AT = 240, 60, 150
Curves = dict[str, dict[int, list[float]]]
"""By name and step, every value that was found."""


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="trackers-"))
    words = [
        "--task", "sequence_classification",
        "--pretrained-model-name-or-path", str(make_model_folder(root / "model")),
        "--data-path", str(make_pair_data(root / "data")), "--lr", "1e-3", "--train-iters",
        str(STEPS), "--micro-batch-size", "8", "--log-interval", "5", "--eval-interval", "20",
        "--save-interval", str(SAVED_EVERY), "--device", "cpu", "--no-progress",
    ]  # fmt: skip
    os.environ |= {"TRACKIO_DIR": str(root / "trackio"), "WANDB_ERROR_REPORTING": "false"}
    plain, tracked = root / "plain", root / "tracked"
    _run([*words, "--save", str(plain), "--report-to", "none"])
    words += ["--save", str(tracked), "--resume", "auto", "--report-to", "all"]
    words += ["--project", "readback"]
    _run(words, kill_at=KILLED_AT)
    time.sleep(3)  # wandb's own process notices
    _run(words)

    lines = _read_lines(tracked)
    _check_same_numbers(lines, _read_lines(plain))
    readers = (
        ("wandb", _read_wandb, _name_by_phase), ("mlflow", _read_mlflow, _name_plainly),
        ("trackio", _read_trackio, _name_by_phase), ("tensorboard", _read_board, _name_by_phase),
    )  # fmt: skip
    results = [_compare(name, read(tracked), lines, rename) for name, read, rename in readers]
    sys.exit(0 if all(results) else 1)


def _run(words: list[str], kill_at: int | None = None) -> None:
    print("rapidformer", *words, flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "rapidformer", *words], start_new_session=True
    )
    folder = Path(words[words.index("--save") + 1])
    while process.poll() is None:
        reached = max((line["step"] for line in _read_lines(folder)), default=0)
        if kill_at is not None and reached >= kill_at:
            os.kill(process.pid, signal.SIGKILL)
            print(f"killed after step {reached}")
            break
        time.sleep(0.02)
    if process.wait() not in (0, -signal.SIGKILL if kill_at else 0):
        sys.exit(f"the run ended with status {process.returncode}")


def _read_lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _check_same_numbers(lines: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    names = ("loss", "grad_norm", "lr", "eval_loss", "eval_accuracy")
    ours, theirs = (
        [(line["step"], n, line[n]) for line in each for n in names if n in line]
        for each in (lines, plain)
    )
    assert ours == theirs
    print(f"metrics.jsonl: {len(ours)} losses, norms, rates and evaluations, the same to the bit")


def _compare(name: str, curves: Curves, lines: list[dict[str, Any]], rename: Any) -> bool:
    """Whether all points are there, with their values; those of times may differ."""
    expected: Curves = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for key, value in line.items():
            if key != "step" and isinstance(value, (int, float)):
                expected[key][line["step"]].append(value)
    points = twice = unequal = missing = 0
    for key, steps in expected.items():
        for step, values in steps.items():
            points += len(values)
            found = curves.get(rename(key), {}).get(step, [])
            missing += not found
            twice += max(0, len(found) - len(values))
            # TensorBoard keeps 32 bits.
            pairs = [(one, value) for one in found for value in values]
            unequal += not all(abs(one - value) <= 1e-6 * abs(value) for one, value in pairs)
    extra = {
        step for curve in curves.values() for step in curve if not 0 <= step <= STEPS
    }  # fmt: skip
    print(f"{name:<12} {points} points: {missing} missing, {twice} found twice, "
          f"{unequal} with another value, steps {sorted(extra)} outside the run")  # fmt: skip
    timed = {"step_time", "samples_per_second", "tokens_per_second", "seconds_left", "mfu"}
    kept = {k for k in expected if k not in timed and not k.startswith("save_")}
    wrong = [
        (key, step, values, found)
        for key in kept
        for step, values in expected[key].items()
        for found in [curves.get(rename(key), {}).get(step, [])]
        if not found or any(abs(one - values[0]) > 1e-6 * abs(values[0]) for one in found)
    ]
    print(f"{'':<12} {'no' if not wrong else wrong[:3]} difference except in times")
    return not (missing or twice or extra or wrong)


def _name_plainly(name: str) -> str:
    return "learning_rate" if name == "lr" else name


def _name_by_phase(name: str) -> str:
    group, _, rest = name.partition("_")
    return f"{group}/{rest}" if group in ("eval", "test") else f"train/{_name_plainly(name)}"


def _read_mlflow(folder: Path) -> Curves:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'trackers' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("readback")
    [run] = client.search_runs([experiment.experiment_id])
    print("mlflow run", run.info.run_id, run.info.run_name, run.info.status, len(run.data.params))
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            curves[name][point.step].append(point.value)
    return curves


def _read_trackio(folder: Path) -> Curves:
    import trackio

    [run] = trackio.Api().runs("readback")
    print("trackio run", run.id, run.name, len(run.config or {}))
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for row in trackio.SQLiteStorage.get_logs("readback", run.name, run_id=run.id):
        for name, value in row.items():
            if isinstance(value, (int, float)):
                curves[name][row["step"]].append(value)
    return curves


def _read_wandb(folder: Path) -> Curves:
    """By wandb's own messages, for it has no reader without a server. The last file counts.

    That of the killed attempt has the same id; a kill loses up to 32 KiB at its end.
    """
    from wandb.proto import wandb_internal_pb2

    curves: Curves = defaultdict(lambda: defaultdict(list))
    ids = set()
    for path in sorted((folder / "trackers" / "wandb").glob("offline-run-*/*.wandb")):
        steps = []
        curves.clear()
        for data in _read_log(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("run"):
                ids.add((record.run.run_id, record.run.project, record.run.display_name))
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if (step := items.get("train/global_step")) is not None:
                steps.append(step)
                for name, value in items.items():
                    if isinstance(value, (int, float)):
                        curves[name][step].append(value)
        print("wandb file", path.name, "steps", min(steps), "to", max(steps))
    print("wandb run", *ids)
    assert len(ids) == 1
    return curves


def _read_log(content: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format, which a .wandb file is after its first 7 bytes."""
    block, position, whole = 32768, 7, b""
    while position + 7 <= len(content):
        if block - position % block < 7:
            position += block - position % block
            continue
        _, size, kind = struct.unpack("<IHB", content[position : position + 7])
        whole += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # all of a record, or its last part
            yield whole
            whole = b""


def _read_board(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            curves[name][event.step].append(event.value)
    return curves


if __name__ == "__main__":
    main()
