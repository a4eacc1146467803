"""What ``rapidformer plan`` predicted for this run, and what became of it.

With --plan, a process beside the run predicts. The run cannot fail because of it, and waits a few
seconds for it at its end at most. Then both are compared, on screen and in metrics.jsonl, and the
prediction is stored as ``plan.json``. If GPU memory runs out, it names what takes it and what fits.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rapidformer.checkpoint.finding import ARGUMENTS_FILE
from rapidformer.config import Settings
from rapidformer.config.sections import CheckpointArguments
from rapidformer.dist.collectives import gather_from_all
from rapidformer.errors import is_out_of_gpu_memory
from rapidformer.log import get_logger
from rapidformer.planning.devices import GIB
from rapidformer.training.callbacks import Callback, Control, RunningLoop
from rapidformer.training.report import Reporter
from rapidformer.training.run_folder import PLAN_FILE

# It must not beat for rank 0, announce that a signal saves, resume, or write the rank's error file.
_LAUNCHED = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "RAPIDFORMER_",
)  # fmt: skip
_PATIENCE, _PATIENCE_IN_NEED = 15.0, 90.0
"""Seconds that a run waits for its prediction if it is over, and if its memory ran out."""
_PARTS = ("weights", "gradients", "optimizer", "activations", "loss", "gathers", "buffers")


class PredictionReport(Callback):
    """Starts a prediction beside the run, and compares at its end."""

    def __init__(
        self, reporter: Reporter, args: Settings, device: torch.device, *, is_main: bool = True
    ) -> None:
        """On every rank: the fullest one counts, and the main one predicts and reports."""
        self._reporter, self._args, self._device = reporter, args, device
        self._is_main = is_main
        self._process: subprocess.Popen[str] | None = None
        self._step_times: list[float] = []

    def on_train_begin(self, loop: RunningLoop, control: Control) -> None:
        if self._is_main:
            self._process = start_prediction(self._args, self._device)

    def on_log(self, loop: RunningLoop, control: Control, line: dict[str, Any]) -> None:
        if "step_time" in line:
            self._step_times.append(line["step_time"])

    def on_train_end(self, loop: RunningLoop, control: Control) -> None:
        peak = measure_peak(self._device)
        if not self._is_main:
            return
        found = finish_prediction(self._process, self._args)
        if isinstance(found, str):
            self._reporter.say(f"plan      no prediction: {found}")
            return
        predicted = {"memory_gib": found["allocated_gib"], "step_time": found["step_time"]}
        actual: dict[str, float] = {}
        if peak is not None:
            actual["memory_gib"] = peak
            # The first line has what later steps reuse, and the next one may still record graphs.
            times = self._step_times[1:] or self._step_times
            actual |= {"step_time": statistics.median_low(times)} if times else {}
        self._reporter.say(f"plan      {compare(predicted, actual, found['devices'])}")
        line = {f"predicted_{name}": value for name, value in predicted.items()}
        line |= {f"actual_{name}": value for name, value in actual.items()}
        self._reporter.record({"step": loop.step, **line})


def measure_peak(device: torch.device) -> float | None:
    """GiB that were allocated at the peak of the fullest rank; None without a GPU."""
    if device.type != "cuda":  # predictions are for GPUs
        return None
    return max(gather_from_all(torch.cuda.max_memory_allocated(device))) / GIB


def start_prediction(args: Settings, device: torch.device) -> subprocess.Popen[str] | None:
    """Run ``rapidformer plan`` on the settings in the run's folder; None if it has none."""
    if args.save is None:
        return None
    words = ["--config", str(Path(args.save) / ARGUMENTS_FILE), "--json"]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        words += ["--devices", f"{args.world_size}x{properties.name}"]
        words += ["--memory-gib", f"{properties.total_memory / GIB:.2f}"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHED)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "rapidformer", "plan", *words], env=environment, text=True,
            errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError:  # no memory or no process left: the run goes on without
        return None
    with suppress(OSError):  # not by preexec_fn, which may hang in a process with threads
        os.setpriority(os.PRIO_PROCESS, process.pid, 10)
    return process


def finish_prediction(
    process: subprocess.Popen[str] | None, args: CheckpointArguments, patience: float = _PATIENCE
) -> dict[str, Any] | str:
    """What was predicted, stored in the run's folder; or why there is nothing."""
    if process is None:
        return "it could not be started, or the run has no folder (--save)"
    try:
        output, errors = process.communicate(timeout=patience)
        found: dict[str, Any] = json.loads(output)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()  # not for its output: workers of its own may still hold the pipes
        return "the run was over first"
    except ValueError:
        return (errors.strip().splitlines() or ["it ended without one"])[-1]
    with suppress(OSError):
        (Path(args.save or ".") / PLAN_FILE).write_text(json.dumps(found, indent=1) + "\n")
    return found


def compare(predicted: dict[str, float], actual: dict[str, float], devices: str) -> str:
    """Like ``28 GiB predicted, 27.7 measured (+1%); 135 ms per step predicted, ...``."""
    parts = []
    for name, unit, factor in (("memory_gib", "GiB", 1.0), ("step_time", "ms per step", 1000.0)):
        text = f"{factor * predicted[name]:.3g} {unit} predicted"
        if name in actual:
            error = predicted[name] / actual[name] - 1
            text += f", {factor * actual[name]:.3g} measured ({error:+.0%})"
        parts.append(text)
    return "; ".join(parts) + ("" if actual else f", on {devices}")


def advise_on_memory(error: BaseException, args: Settings, device: torch.device) -> None:
    """Give an error of exhausted GPU memory what takes it and what would fit, if plan can say."""
    if not is_out_of_gpu_memory(error) or args.world_size > 1:
        return  # of several ranks, the launcher ends the others before an answer is there
    get_logger().info("GPU memory ran out: asking `rapidformer plan` what would fit ...")
    found = finish_prediction(start_prediction(args, device), args, _PATIENCE_IN_NEED)
    if not isinstance(found, str):
        error.advice = describe_memory(found)  # type: ignore[attr-defined]


def describe_memory(found: dict[str, Any]) -> str:
    """What the memory goes to, and the nearest layout that fits."""
    sizes = {name: found["memory"].get(name, 0.0) for name in _PARTS}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    listed = ", ".join(f"{name} {sizes[name]:.1f}" for name in largest)
    text = (
        f"The run is predicted to need {found['memory_gib']:.1f} GiB ({listed}, ...); the device "
        f"has {found['device_memory_gib']:.1f} GiB."
    )
    if found["fits"]:
        text += (
            " It should fit: some rows may be longer than those looked at, or other processes use "
            "the GPU."
        )
    limit = found["memory_gib"] * (0.95 if found["fits"] else 1)
    smaller = [
        option
        for option in (*found["switches"], *found["layouts"])
        if option["flags"] and option["memory_gib"] < limit
    ]
    if not smaller:
        return text if found["fits"] else f"{text} No layout fits this device."
    best = smaller[0]
    return (
        f"{text} The nearest that fits, with the same result: {best['flags']} "
        f"({best['memory_gib']:.1f} GiB, {1000 * best['step_time']:.0f} ms per step)."
    )
