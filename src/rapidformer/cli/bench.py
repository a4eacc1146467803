"""``rapidformer bench``: how fast is this run, where does its time go, and what would help?

This process only starts the runs, each in new processes, and prints what they measured.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rapidformer.benchmarking.job import Job, Result, merge
from rapidformer.benchmarking.report import describe_gain, describe_ratio, describe_result
from rapidformer.cli.own_flags import CommandParser, HelpShownError, with_dashes
from rapidformer.cli.run_output import start_run, write_output_to
from rapidformer.config import Settings
from rapidformer.config.parse import CommandLine, read_flags
from rapidformer.config.validate import find_problems
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.launch.environment import LaunchPlan, count_gpus, is_launched, plan_launch

# Tells the processes that this command starts which run they belong to.
JOB_VARIABLE = "RAPIDFORMER_BENCHMARK"
PEERS = {
    "hf": "Hugging Face's Trainer",
    "hf-compile": "Hugging Face's Trainer with torch.compile",
}
# Switches to try, and the setting that shows whether the run has it already.
_CANDIDATES = (("--mixed-precision", "mixed_precision"), ("--compile", "compile"))
# The least number of steps to time, and steps before them.
_GPU_STEPS, _CPU_STEPS = (50, 15), (8, 3)
_SECONDS = 5.0
"""About how long the timed steps take together: a few short ones would not tell much."""


def run(argv: list[str]) -> None:
    """Measure and print; in a process of one of the runs, run it."""
    if JOB_VARIABLE in os.environ and is_launched():
        _work(Job.from_text(os.environ[JOB_VARIABLE]), argv)
        return
    try:
        own, words = _build_parser().parse_known_args([with_dashes(word) for word in argv])
    except HelpShownError:
        return
    if not argv:
        _build_parser().print_help()
        return
    command = read_flags(words)
    args = command.args
    plan = plan_launch(args)
    processes = plan.processes
    _check(command, own, plan)
    folder = Path(tempfile.mkdtemp(prefix="rapidformer-bench-"))
    benchmark = _Benchmark(words, args, own, processes, folder)
    benchmark.run()
    shutil.rmtree(folder)


def _build_parser() -> CommandParser:
    parser = CommandParser(
        prog="rapidformer bench",
        usage="rapidformer bench [--against hf] [--no-tries] [--json] FLAGS OF A RUN",
        description=f"Time the run for about {_SECONDS:.0f} seconds, then try switches that it "
        "does not have yet. Nothing is kept.",
        epilog="All other flags are those of the run: rapidformer --help.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--bench-steps", type=int, metavar="N",
        help=f"steps to time (default: as many as take {_SECONDS:.0f} seconds, but at least 50, on "
        "a CPU 8, and at most 500)",
    )  # fmt: skip
    parser.add_argument(
        "--bench-warmup", type=int, metavar="N", help="steps before them (default: 15, on a CPU 3)"
    )
    parser.add_argument(
        "--against", action="append", default=[], choices=PEERS,
        help="also time Hugging Face's Trainer on the same model and data, in turn with the run; "
        "may be repeated",
    )  # fmt: skip
    parser.add_argument("--no-tries", action="store_true", help="do not try further switches")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser


def _check(command: CommandLine, own: Any, plan: LaunchPlan) -> None:
    """Check everything that can be wrong before a process is started."""
    args = command.args
    problems = [
        f"--bench-{name} must be at least {least}, got {value}."
        for name, value, least in (("steps", own.bench_steps, 1), ("warmup", own.bench_warmup, 1))
        if value is not None and value < least
    ]
    if args.user_script is None:
        problems += command.problems  # here every flag must be known
        if args.task is None:
            problems.append(
                "nothing to measure: give the flags of a run, with --task (`rapidformer tasks` "
                "lists them) or --user-script FILE.py."
            )
    if plan.nodes > 1 or args.hostfile is not None:
        problems.append("a benchmark runs on one node: say --nnodes 1, and give no --hostfile.")
    if own.against and plan.processes > 1:
        problems.append("--against compares runs of one process: say --nproc-per-node 1.")
    problems += find_problems(args.replace("the processes to start", world_size=plan.processes))
    if problems:
        raise ConfigurationError(problems)


class _Benchmark:
    """The runs, one after the other."""

    def __init__(
        self, words: list[str], args: Settings, own: Any, processes: int, folder: Path
    ) -> None:
        self._words = words
        self._args = args
        self._own = own
        self._processes = processes
        self._folder = folder
        self._is_on_gpu = args.device != "cpu" and count_gpus() > 0
        self._results: dict[str, Result] = {}
        self._steps = 0
        """How many steps to time; decided by the first run."""

    def run(self) -> None:
        base = self._measure("run", "the run as given")
        if not self._own.json:
            _write(["", _describe_run(base, self._processes), "", *describe_result(base), ""])
        if self._own.against:
            self._compare(base)
        for flag in self._list_tries():
            changed = self._try(flag)
            if changed is not None:
                self._tell(f"With {flag}: {describe_gain(base, changed)}")
        if self._own.json:
            _write([json.dumps({name: asdict(each) for name, each in self._results.items()})])

    def _compare(self, base: Result) -> None:
        """Time the peers twice, in turn with the run: a machine is not always equally fast."""
        peers = {peer: PEERS[peer] for peer in self._own.against}
        first = {peer: self._measure(peer, name, peer=peer) for peer, name in peers.items()}
        again = self._measure("run-2", "the run as given, again")
        for peer, name in peers.items():
            second = self._measure(f"{peer}-2", f"{name}, again", peer=peer)
            self._tell(f"{name}: {describe_ratio([base, again], [first[peer], second])}")

    def _list_tries(self) -> list[str]:
        if self._own.no_tries:
            return []
        return [flag for flag, setting in _CANDIDATES if not getattr(self._args, setting)]

    def _try(self, flag: str) -> Result | None:
        """The run with one more switch; None if it cannot have it."""
        try:
            return self._measure(flag.removeprefix("--"), f"the run with {flag}", flag)
        except RapidformerError as error:
            self._tell(f"With {flag}: not possible. {str(error).splitlines()[0]}")
            return None

    def _tell(self, line: str) -> None:
        if not self._own.json:
            _write([line])

    def _measure(self, name: str, description: str, *more: str, peer: str | None = None) -> Result:
        """Run it in new processes and read what they measured."""
        least, warm_up = _GPU_STEPS if self._is_on_gpu else _CPU_STEPS
        # Later runs time as many steps as the first one, so that all see the same batches.
        steps = self._own.bench_steps or self._steps
        job = Job(
            folder=str(self._folder),
            name=name,
            steps=steps or least,
            seconds=0.0 if steps else _SECONDS,
            warm_up=self._own.bench_warmup or warm_up,
            peer=peer,
        )
        sys.stderr.write(f"running  {description}\n")
        try:
            start_run(
                ["bench", *self._words, *more], self._args,
                processes=self._processes, variable=JOB_VARIABLE, job=job.to_text(),
            )  # fmt: skip
        except RapidformerError as error:
            error.args = (f"{error}\nThis was {description}; its output is in {self._folder}.",)
            raise
        result = merge([Result.load(job.get_path(rank)) for rank in range(self._processes)])
        self._results[name] = result
        self._steps = self._steps or len(result.step_times)
        return result


def _work(job: Job, words: list[str]) -> None:
    """In a process of a run: train as ``rapidformer train`` would, and save what was measured."""
    rank = int(os.environ["RANK"])
    write_output_to(Path(job.folder) / f"{job.name}_{rank}.log")
    from rapidformer.benchmarking.benched_run import measure_run
    from rapidformer.benchmarking.hugging_face import measure_trainer
    from rapidformer.cli.train import run as train
    from rapidformer.dist.processes import stop_processes

    measure = measure_trainer if job.peer else measure_run
    measure(job, lambda: train(read_flags(words))).save(job.get_path(rank))
    stop_processes()


def _describe_run(result: Result, processes: int) -> str:
    ranks = f", {processes} ranks" if processes > 1 else ""
    return (
        f"{result.model}, {result.parameters:,} parameters, {result.precision} on {result.device}"
        f"{ranks}; {len(result.step_times)} steps of {result.global_batch} samples"
    )


def _write(lines: list[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
