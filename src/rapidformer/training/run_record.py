"""What a run's page shows beside the numbers: ``events.jsonl``, and the page itself at the end.

Rank 0 writes; the others only take part in the few gatherings of the phases. Nothing here may end
or delay a run: what fails is left out.
"""

from __future__ import annotations

import functools
import os
import platform
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rapidformer.config import Settings
from rapidformer.data.label_view import Prepared, iterate_examples, to_json, view_batch
from rapidformer.data.update import Update
from rapidformer.dist.collectives import gather_on_first
from rapidformer.dist.heartbeat import announce_record, take_phases
from rapidformer.log import get_logger
from rapidformer.report import PAGE_FILE
from rapidformer.report.page import write_page
from rapidformer.run_events import EVENTS_FILE, append_event
from rapidformer.training.callbacks import Callback, Control, RunningLoop

_PACKAGES = (
    "rapidformer", "torch", "transformers", "tokenizers", "datasets", "peft", "safetensors",
    "numpy", "triton", "flash-attn", "deepspeed", "torchao",
)  # fmt: skip
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_HOME")
_PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_", "RAPIDFORMER_")

_SHOWN_EXAMPLES, _SHOWN_TOKENS = 4, 512
"""Of the first batch."""


class RunRecord(Callback):
    def __init__(
        self,
        args: Settings,
        *,
        is_main: bool,
        summary: Sequence[str],
        prepared: Prepared | None,
        details: dict[str, Any],
        check_folder: Callable[[], None],
    ) -> None:
        """``prepared`` reads batches; evaluations leave tables and samples in ``details``."""
        self.folder = Path(args.save) if is_main and args.save is not None else None
        self._args, self._summary = args, summary
        self._prepared, self._details, self._check_folder = prepared, details, check_folder
        self._seconds: dict[str, list[float]] = {}
        """By phase, then by rank."""
        self._logs = self._begun_at = 0
        self._failure = ""

    def _append(self, event: str, /, **facts: Any) -> None:
        if self.folder is not None:
            with _quietly():
                self._check_folder()  # another run may have taken it over
                append_event(self.folder, event, **facts)

    def on_train_begin(self, loop: RunningLoop, control: Control) -> None:
        take_phases()  # what came before is not training
        self._begun_at = loop.step
        if self.folder is None:
            return
        with _quietly():
            if not loop.step:
                (self.folder / EVENTS_FILE).unlink(missing_ok=True)
            self._append(
                "start", step=loop.step, train_iters=loop.train_iters,
                command=describe_command(), folder=str(Path.cwd()), summary=list(self._summary),
                environment=describe_environment(self._args.world_size),
            )  # fmt: skip
            announce_record(self.folder / EVENTS_FILE)

    def see_first(self, update: Update) -> None:
        """Keep the first examples of the run as the model has seen them."""
        batch, count = update[0].batch, update[0].info.rows
        if self.folder is None or self._prepared is None or not isinstance(batch, Mapping):
            return
        with _quietly():
            rows = [
                to_json(view_batch(example, self._prepared), _SHOWN_TOKENS)
                for example in iterate_examples(batch, count, most=_SHOWN_EXAMPLES)
            ]
            self._append("batch", examples=count, rows=rows)

    def on_log(self, loop: RunningLoop, control: Control, line: dict[str, Any]) -> None:
        results = {name for name in line if name.startswith(("eval_", "test_"))}
        if results:
            split = "test" if any(name.startswith("test_") for name in results) else "validation"
            if self._details:
                self._append("evaluation", step=line["step"], split=split, **self._details)
                self._details.clear()
            return
        self._logs += 1
        if self._logs & (self._logs - 1) == 0:  # 1, 2, 4, 8, ...: it waits for all ranks
            self._gather_phases(loop.step)

    def on_train_end(self, loop: RunningLoop, control: Control) -> None:
        self._gather_phases(loop.step)

    def _gather_phases(self, step: int) -> None:
        if self._args.save is None:
            return
        everyone = gather_on_first(take_phases())
        if everyone is None or self.folder is None or step <= self._begun_at:
            return
        for rank, phases in enumerate(everyone):
            for name, seconds in phases.items():
                self._seconds.setdefault(name, [0.0] * len(everyone))[rank] += seconds
        totals = {n: [round(value, 4) for value in v] for n, v in self._seconds.items()}
        self._append("phases", step=step, steps=step - self._begun_at, seconds=totals)

    def see_error(self, error: BaseException) -> None:
        """Keep what ends the run; an interruption is no failure."""
        with _quietly():
            if not isinstance(error, (KeyboardInterrupt, SystemExit)):
                self._failure = f"{type(error).__name__}: {error}"[:2000]

    def finish(self, loop: RunningLoop, *, is_done: bool) -> None:
        """The run has ended, well or not: write the page."""
        if self.folder is None:
            return
        state = "failed" if self._failure else "complete" if is_done else "stopped"
        self._append("end", step=loop.step, state=state, reason=self._failure)
        if self._args.report == "off":
            return
        with _quietly():
            self._check_folder()
            page = write_page([self.folder], self.folder / PAGE_FILE)
            loop.say(f"page      {page}")


@contextmanager
def _quietly() -> Iterator[None]:
    try:
        yield
    except Exception as reason:
        get_logger().debug("the run's page lacks something: %s", reason, exc_info=True)


def describe_command() -> str:
    """The command of this process, as a user types it."""
    program, *words = sys.argv
    is_ours = Path(program).name in ("rapidformer", "main.py", "__main__.py", "-m")
    if is_ours or "--user-script" in words:
        return shlex.join(["rapidformer", *words])
    return shlex.join(["python", program, *words])


def describe_environment(processes: int) -> dict[str, str]:
    """Versions, machine and the variables that matter; none that may hold a secret."""
    facts = {
        "host": socket.gethostname(), "system": platform.platform(),
        "python": platform.python_version(), "processes": str(processes),
        "device": _describe_device(), **list_versions(),
    }  # fmt: skip
    if torch.version.cuda:
        facts["cuda"] = str(torch.version.cuda)
    wanted = {n: v for n, v in os.environ.items() if n in _VARIABLES or n.startswith(_PREFIXES)}
    return facts | {n: v for n, v in sorted(wanted.items()) if "TOKEN" not in n and "KEY" not in n}


def _describe_device() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


@functools.cache
def list_versions() -> dict[str, str]:
    """Of what a run is made of, by package."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
