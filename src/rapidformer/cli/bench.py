"""``rapidformer bench``: how fast is this run, where does its time go, and what would help?"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rapidformer.benchmarking.job import (
    Job,
    Result,
    describe_gain,
    describe_ratio,
    describe_result,
    merge,
)
from rapidformer.cli.own_flags import CommandParser, say
from rapidformer.cli.run_output import (
    ChildRuns,
    Train,
    find_run_problems,
    start_run,
    take_part,
)
from rapidformer.config.parse import CommandLine, read_flags
from rapidformer.config.switches import Situation, get_switch
from rapidformer.config.validate import find_problems
from rapidformer.errors import RapidformerError, raise_problems
from rapidformer.launch.environment import LaunchPlan, count_gpus, plan_launch

# Tells the processes that this command starts which run they belong to.
JOB_VARIABLE = "RAPIDFORMER_BENCHMARK"
PEERS = {"hf": "Hugging Face's Trainer", "hf-compile": "Hugging Face's Trainer with torch.compile"}
_FEW_TOKENS = 0.9
"""If less of a batch is real tokens, rows are of different lengths: a budget of tokens may help."""
# The least number of steps to time, and steps before them.
_GPU_STEPS, _CPU_STEPS = (50, 15), (8, 3)
_SECONDS = 5.0
"""About how long the timed steps take together: a few short ones would not tell much."""


def run(argv: list[str]) -> None:
    """Measure and print; in a process of one of the runs, run it."""
    if take_part(JOB_VARIABLE, Job, argv, _measure):
        return
    options, words = _build_parser().read_run(argv)
    command = read_flags(words)
    plan = plan_launch(command.args)
    _check(command, options, plan)
    folder = Path(tempfile.mkdtemp(prefix="rapidformer-bench-"))
    _Benchmark(words, command.args, options, plan.processes, folder).run()
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
    parser.add(
        "--bench-steps", "N", f"steps to time (default: as many as take {_SECONDS:.0f} seconds, "
        "but at least 50, on a CPU 8, and at most 500)",
    )  # fmt: skip
    parser.add("--bench-warmup", "N", "steps before them (default: 15, on a CPU 3)")
    parser.add(
        "--against", "|".join(PEERS), "also time Hugging Face's Trainer on the same model and "
        "data, in turn with the run; may be repeated", action="append", default=[], choices=PEERS,
    )  # fmt: skip
    parser.add("--no-tries", "", "do not try further switches")
    parser.add("--json", "", "print the results as JSON")
    return parser


def _check(command: CommandLine, options: Any, plan: LaunchPlan) -> None:
    """Check everything that can be wrong before a process is started."""
    args = command.args
    problems = [
        f"--bench-{name} must be at least 1, got {value}."
        for name, value in (("steps", options.bench_steps), ("warmup", options.bench_warmup))
        if value is not None and value < 1
    ]
    problems += find_run_problems(command, "measure")
    if plan.nodes > 1 or args.hostfile is not None:
        problems.append("a benchmark runs on one node: say --nnodes 1, and give no --hostfile.")
    if options.against and plan.processes > 1:
        problems.append("--against compares runs of one process: say --nproc-per-node 1.")
    problems += find_problems(args.replace("the processes to start", world_size=plan.processes))
    raise_problems(problems)


@dataclass
class _Benchmark(ChildRuns):
    """The runs, one after the other."""

    results: dict[str, Result] = field(default_factory=dict)
    steps: int = 0
    """How many steps to time; decided by the first run."""

    @cached_property
    def _is_on_gpu(self) -> bool:
        return self.args.device != "cpu" and count_gpus() > 0

    def run(self) -> None:
        base = self._measure("run", "the run as given")
        if not self.options.json:
            _write("", _describe_run(base, self.processes), "", *describe_result(base), "")
        if self.options.against:
            self._compare(base)
        for words in () if self.options.no_tries else self._list_candidates(base):
            self._tell(f"With {' '.join(words)}: {self._try(words, base)}")
        if self.options.json:
            _write(json.dumps({name: asdict(one) for name, one in self.results.items()}))

    def _compare(self, base: Result) -> None:
        """Time the peers twice, in turn with the run: a machine is not always equally fast."""
        peers = {peer: PEERS[peer] for peer in self.options.against}
        first = {peer: self._measure(peer, name, peer=peer) for peer, name in peers.items()}
        again = self._measure("run-2", "the run as given, again")
        for peer, name in peers.items():
            second = self._measure(f"{peer}-2", f"{name}, again", peer=peer)
            self._tell(f"{name}: {describe_ratio([base, again], [first[peer], second])}")

    def _list_candidates(self, base: Result) -> Iterator[list[str]]:
        """Flags to try that the run does not have."""
        args = self.args
        if not args.mixed_precision:
            yield ["--mixed-precision"]
        place = Situation(device="cuda" if self._is_on_gpu else "cpu")
        if not get_switch("compilation").applies(args, place):
            yield ["--compile", *([] if self._is_on_gpu else ["--compile-backend", "inductor"])]
        if args.tokens_per_micro_batch:
            return
        size = args.micro_batch_size or base.global_batch
        if base.rows > len(base.step_times) * size * base.ranks:
            yield from self._list_larger_batches(size, base)
        if base.tokens < _FEW_TOKENS * base.slots and size > 1:
            mean = base.slots * size // base.rows  # of a micro-batch
            yield ["--tokens-per-micro-batch", str(-(-mean // 64) * 64)]

    def _list_larger_batches(self, size: int, base: Result) -> Iterator[list[str]]:
        """Fewer and larger micro-batches for the same update."""
        words = ["--micro-batch-size", str(2 * size)]
        steps = self.args.gradient_accumulation_steps
        if steps is None and base.global_batch % (2 * size * base.ranks) == 0:
            yield [*words, "--global-batch-size", str(base.global_batch)]
        elif steps is not None and steps % 2 == 0:
            yield [*words, "--gradient-accumulation-steps", str(steps // 2)]

    def _try(self, words: list[str], base: Result) -> str:
        """What the run gains by one more switch."""
        try:
            name = words[0].removeprefix("--")
            changed = self._measure(name, f"the run with {' '.join(words)}", *words)
        except RapidformerError as error:
            return f"not possible. {str(error).splitlines()[0]}"
        return describe_gain(base, changed)

    def _tell(self, line: str) -> None:
        if not self.options.json:
            _write(line)

    def _measure(self, name: str, description: str, *more: str, peer: str | None = None) -> Result:
        """Run it in new processes and read what they measured."""
        least, warm_up = _GPU_STEPS if self._is_on_gpu else _CPU_STEPS
        # Later runs time as many steps as the first one, so that all see the same batches.
        steps = self.options.bench_steps or self.steps
        job = Job(
            folder=str(self.folder), name=name, steps=steps or least, peer=peer,
            seconds=0.0 if steps else _SECONDS, warm_up=self.options.bench_warmup or warm_up,
        )  # fmt: skip
        say(f"running  {description}")
        start_run(
            ["bench", *self.words, *more], self.args,
            processes=self.processes, variable=JOB_VARIABLE, job=job,
            note=f"This was {description}; its output is in {self.folder}.",
        )  # fmt: skip
        result = merge([Result.load(job.get_path(rank)) for rank in range(self.processes)])
        self.results[name] = result
        self.steps = self.steps or len(result.step_times)
        return result


def _measure(job: Job, train: Train) -> Result:
    from rapidformer.benchmarking.benched_run import measure_run, measure_trainer

    return (measure_trainer if job.peer else measure_run)(job, train)


def _describe_run(result: Result, processes: int) -> str:
    ranks = f", {processes} ranks" if processes > 1 else ""
    return (
        f"{result.model}, {result.parameters:,} parameters, {result.precision} on {result.device}"
        f"{ranks}; {len(result.step_times)} steps of {result.global_batch} samples"
    )


def _write(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)
