"""``rapidformer sweep``: try settings on runs of their own, and find the best ones."""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.finding import METRICS_FILE
from rapidformer.checkpoint.publish import replace_text
from rapidformer.cli.checks import check_command
from rapidformer.cli.own_flags import CommandParser, say
from rapidformer.cli.run_output import find_flag_problems
from rapidformer.config.parse import CommandLine, read_flags
from rapidformer.errors import (
    ConfigurationError,
    RapidformerError,
    collecting,
    raise_problems,
)
from rapidformer.foreign_names import get_foreign_flags
from rapidformer.launch.environment import count_gpus
from rapidformer.launch.worker import PARENT_VARIABLE
from rapidformer.nearest import suggest
from rapidformer.report import PAGE_FILE
from rapidformer.report.page import RESULTS_FILE, write_page
from rapidformer.strict_json import parse_json
from rapidformer.sweeping.space import (
    Parameters,
    Space,
    count_choices,
    list_corners,
    parse_space,
    to_flags,
)
from rapidformer.sweeping.study import Outcome, Study, Trial, load_optuna, run_trials

_TRIALS = 20
_PAUSE = 0.5
"""Seconds between looks at a trial."""
_PATIENCE = 60.0
"""Seconds for a trial that is stopped to save and leave."""


def run(argv: list[str]) -> None:
    """Run what is left of the sweep, then print its table."""
    options, words = _build_parser().read_run(argv)
    command = read_flags(words)
    space = _check(command, options)
    load_optuna("rapidformer sweep")
    args = command.args
    metric = options.metric if options.metric.startswith("eval_") else f"eval_{options.metric}"
    from rapidformer.training.best_model import is_greater_better

    greater = is_greater_better(metric) if options.goal is None else options.goal == "maximize"
    folder = Path(args.save or _name_folder(command)).expanduser()
    plain = _drop_save(words)
    # What a trial would refuse, with the first and the last of all values.
    for parameters in list_corners(space):
        tried = read_flags(_spell_trial(plain, parameters, folder / "trial"))
        if args.user_script is None:
            check_command("train", tried)
    folder.mkdir(parents=True, exist_ok=True)
    study = Study(
        folder, space, is_greater_better=greater, seed=args.seed, parallel=options.parallel,
        description={
            "flags": shlex.join(plain), "--sweep": " ".join(options.sweep), "--metric": metric,
            "goal": "maximize" if greater else "minimize", "prunes": options.prune,
        },
        prunes=options.prune,
    )  # fmt: skip
    if args.metric_for_best_model is None:
        plain = [*plain, "--metric-for-best-model", metric]
    _Sweep(study, folder, plain, metric, _count(options, space), options.parallel).run()


def _build_parser() -> CommandParser:
    parser = CommandParser(
        prog="rapidformer sweep",
        usage="rapidformer sweep FLAGS OF A RUN --sweep NAME=VALUES ... [--trials N] "
        "[--metric NAME] [--parallel N]",
        description="Run trials with other settings, each in a folder of its own, and find the "
        "best. The same command goes on with a sweep that was interrupted.",
        epilog="All other flags are those of the run: rapidformer --help. --save is the sweep's "
        "folder, --seed also decides what is tried.",
        allow_abbrev=False,
    )
    parser.add(
        "--sweep", "NAME=VALUES", "what to try: lr=1e-5..1e-3:log (any number between, on a "
        "logarithmic scale), epochs=1..5, micro_batch_size=8,16 (these values)", nargs="+",
        default=[],
    )  # fmt: skip
    parser.add(
        "--trials", "N", f"how many (default: all combinations, or {_TRIALS} if there is a range)"
    )
    parser.add(
        "--metric", "NAME", "metric of the evaluations to compare by; the best evaluation of a "
        "trial counts (default: eval_loss)", default="eval_loss",
    )  # fmt: skip
    parser.add(
        "--goal", "maximize|minimize", "what to do with it (default: a loss, an error or a "
        "perplexity is minimized)", choices=("maximize", "minimize"),
    )  # fmt: skip
    parser.add("--parallel", "N", "trials at a time, which share the GPUs (default: 1)", default=1)
    parser.add(
        "--no-prune", "", "let every trial run to its end (default: one that is worse than half of "
        "the earlier ones after as many evaluations is stopped)", action="store_false",
        dest="prune",
    )  # fmt: skip
    return parser


def _check(command: CommandLine, options: Any) -> Space:
    """Everything that can be wrong in the command itself."""
    problems = find_flag_problems(command, "sweep")
    if not options.sweep:
        problems.append("nothing to try: give --sweep NAME=VALUES, such as lr=1e-5..1e-3:log.")
    for name in ("trials", "parallel"):
        value = getattr(options, name)
        if value is not None and value < 1:
            problems.append(f"--{name} must be at least 1, got {value}.")
    problems += [
        f"--{name} is not for a sweep: {reason}."
        for name, reason in (
            ("load", "each trial starts anew; --finetune has its weights from a model"),
            ("overwrite", "choose another folder with --save"),
            ("hostfile", "a sweep runs on one node"),
        )
        if command.args.is_given(name) and getattr(command.args, name)
    ]
    with collecting(problems):
        space = parse_space(options.sweep, command.args)
    raise_problems(problems)
    return space


def _spell_trial(words: list[str], parameters: Parameters, folder: Path) -> list[str]:
    return [*words, *to_flags(parameters), "--save", str(folder), "--resume", "auto"]


def _count(options: Any, space: Space) -> int:
    most = count_choices(space)
    if most is None:
        return options.trials or _TRIALS
    return min(options.trials or most, most)


def _name_folder(command: CommandLine) -> str:
    """Always the same for a task and a model: the same command finds its sweep again."""
    args = command.args
    task = Path(args.user_script).stem if args.user_script else args.task
    model = args.pretrained_model_name_or_path or args.model_type or ""
    return str(Path("runs") / "-".join(["sweep", str(task), Path(model).name]).rstrip("-"))


def _drop_save(words: list[str]) -> list[str]:
    """The flags without the sweep's folder, by any of its names."""
    aliases = get_foreign_flags().aliases
    names = ["save", *(alias for alias, name in aliases.items() if name == "save")]
    spelt = {f"--{name.replace('_', dash)}" for name in names for dash in "_-"}
    parser = CommandParser(add_help=False, allow_abbrev=False)
    parser.add_argument(*spelt, nargs="?")
    return parser.parse_known_args(words)[1]


@dataclass
class _Sweep:
    """The trials, each a ``rapidformer train`` in processes of its own."""

    study: Study
    folder: Path
    words: list[str]
    metric: str
    count: int
    parallel: int
    _slots: queue.Queue[int] = field(default_factory=queue.Queue)

    def run(self) -> None:
        left = self.count - self.study.ended
        say(f"sweep     {self.count} trials, {max(left, 0)} to run; {self.folder}")
        for slot in range(self.parallel):
            self._slots.put(slot)
        try:
            run_trials(self.study, self.count, self.parallel, self._run_trial, self._tell)
        except KeyboardInterrupt:
            say(f"stopped after {self.study.ended} trials: the same command goes on.")
            raise
        finally:
            self._write_results()
        print("", *self._draw_table(), sep="\n", flush=True)
        if self.study.ended:
            print(f"page      {write_page([self.folder], self.folder / PAGE_FILE)}", flush=True)

    def _run_trial(self, number: int, parameters: Parameters, stop: threading.Event) -> Outcome:
        folder = self._get_folder(number)
        words = _spell_trial(self.words, parameters, folder)
        log = self.folder / "logs" / f"{folder.name}.log"
        log.parent.mkdir(exist_ok=True)
        slot = self._slots.get()
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "rapidformer", "train", *words, "--no-progress"],
                    stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    env={"WANDB_RUN_GROUP": self.folder.name, **os.environ,
                         PARENT_VARIABLE: str(os.getpid()), **self._choose_gpus(slot)},
                )  # fmt: skip
            try:
                return self._follow(number, process, log, stop)
            finally:
                _stop(process)
        finally:
            self._slots.put(slot)

    def _follow(
        self, number: int, process: subprocess.Popen[bytes], log: Path, stop: threading.Event
    ) -> Outcome:
        """Look at the trial's evaluations until it ends, or need not go on."""
        folder = self._get_folder(number)
        while True:
            status = _wait(process)
            values = self._read_evaluations(folder, has_ended=status == 0)
            for end in range(1, len(values) + 1):
                # One by one, as if none had been late: what is stopped does not depend on time.
                if self.study.is_hopeless(number, values[:end]):
                    return Outcome("pruned", values[:end])
            if status == 0:
                return Outcome("complete", values)
            if stop.is_set():
                raise RapidformerError("the sweep was stopped.")
            if status is not None:
                return Outcome("failed", values, _find_error(log, status))

    def _read_evaluations(self, folder: Path, *, has_ended: bool) -> list[float]:
        path = folder / METRICS_FILE
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        evaluated = [
            parse_json(line)
            for line in text.splitlines(keepends=True)
            if '"eval_' in line and line.endswith("\n")
        ]
        if has_ended and not evaluated:
            raise ConfigurationError(
                f"{folder} has no evaluation to compare: give validation data, such as "
                "--validation-split 0.1, and no --eval-strategy no."
            )
        if evaluated and self.metric not in evaluated[0]:
            names = [name for name in evaluated[0] if name.startswith("eval_")]
            raise ConfigurationError(
                f"--metric {self.metric}: the evaluations have {', '.join(names)}."
                f"{suggest(self.metric, names)}"
            )
        return [float(line[self.metric]) for line in evaluated if self.metric in line]

    def _choose_gpus(self, slot: int) -> dict[str, str]:
        """An equal share of the GPUs for each trial that runs at the same time."""
        present = count_gpus() if self.parallel > 1 else 0
        if not present:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(gpu) for gpu in range(present)]
        share = max(1, present // self.parallel)
        chosen = [names[(slot * share + gpu) % present] for gpu in range(share)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}

    def _get_folder(self, number: int) -> Path:
        return self.folder / f"trial_{number:04d}"

    def _tell(self, trial: Trial) -> None:
        self._write_results()
        what = trial.error if trial.state == "failed" else f"{self.metric} {trial.value:.6g}"
        state = "" if trial.state == "complete" else f" ({trial.state})"
        say(f"trial {trial.number}  {_describe(trial.parameters)}: {what}{state}")

    def _write_results(self) -> None:
        best = self.study.best
        content = {
            "metric": self.metric,
            "best": None if best is None else best.number,
            "command": None if best is None else self._spell_command(best),
            "trials": [
                {**asdict(one), "folder": self._get_folder(one.number).name}
                for one in self.study.trials
            ],
        }
        replace_text(self.folder / RESULTS_FILE, json.dumps(content, indent=1) + "\n")

    def _spell_command(self, trial: Trial) -> str:
        return shlex.join(["rapidformer", *self.words, *to_flags(trial.parameters)])

    def _draw_table(self) -> list[str]:
        trials = self.study.trials[: self.count]
        best = self.study.best
        sign = -1 if self.study.is_greater_better else 1
        trials.sort(key=lambda one: (one.state != "complete", sign * (one.value or 0.0)))
        rows = [["trial", self.metric, *self.study.space, ""]]
        for one in trials:
            value = "" if one.value is None else f"{one.value:.6g}"
            note = one.error if one.state == "failed" else one.state.replace("complete", "")
            values = [str(one.parameters[name]) for name in self.study.space]
            rows.append([str(one.number), value, *values, note])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if best is None:
            return [*lines, "", f"no trial ran to its end; see {self.folder / 'logs'}"]
        return [
            *lines, "", f"best      trial {best.number}: {self._get_folder(best.number)}",
            f"again     {self._spell_command(best)}", f"results   {self.folder / RESULTS_FILE}",
        ]  # fmt: skip


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_PAUSE)
    except subprocess.TimeoutExpired:
        return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let the run save and leave, but not for ever."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _find_error(log: Path, status: int) -> str:
    """The last error in a trial's output, on one line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line for line in lines if line.startswith("error: ")] or [
        line for line in lines if line
    ]
    reason = told[-1].removeprefix("error: ") if told else "no output"
    killed = f"killed by {signal.Signals(-status).name}; " if status < 0 else ""
    return f"{killed}{reason}"[:300]


def _describe(parameters: Parameters) -> str:
    return ", ".join(f"{name} {value}" for name, value in parameters.items())
