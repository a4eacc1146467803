"""``rapidformer verify``: does a small copy of the run give the same result without switches?"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from rapidformer.cli.own_flags import CommandParser, say
from rapidformer.cli.run_output import (
    ChildRuns,
    Train,
    find_run_problems,
    start_run,
    take_part,
)
from rapidformer.config.parse import CommandLine, read_flags
from rapidformer.config.switches import SWITCHES
from rapidformer.config.validate import find_problems
from rapidformer.errors import RapidformerError, count, raise_problems
from rapidformer.run_events import append_event, find_run
from rapidformer.verification.causes import find_equal_weights
from rapidformer.verification.compare import Comparison, compare, describe_cause, format_table
from rapidformer.verification.settings import (
    Job,
    Kind,
    can_narrow,
    count_processes,
    has_own_count,
    list_left_out,
    list_switches,
)
from rapidformer.verification.trace import Trace, count_parameters, count_samples

# Tells the processes that this command starts which run they belong to.
JOB_VARIABLE = "RAPIDFORMER_VERIFICATION"
DIFFERS, UNDECIDED = 3, 4

_DRAWN = (
    "labels are drawn at random for each micro-batch, so the single process was given the same "
    "micro-batches"
)
_CANCELLED = (
    "limits above 1e-05 are the differences that one process shows if the last bits of its "
    "weights change: anything smaller is round-off"
)
_RANDOM = (
    "undecided: one process with other random numbers gives a different result too, so the "
    "forward pass uses random numbers. Draw them in the dataset or the collate function (where "
    "they depend only on the sample's position), or not at all. Dropout is off if it is a module, "
    "or if its rate is an attribute with `drop` in its name."
)
_DIFFERENT = "different: these switches change the result."
_CUT = (
    "different, but not because of the switches: one process that cuts the batch into the same "
    "micro-batches gives the same result. The loss is not a mean over the labels that were "
    "counted: let run_forward_step return (loss, n), where n is what the loss is a mean over. If "
    "it is more than a mean (an expert-balancing loss), add --same-micro-batches."
)


class VerificationError(RapidformerError):
    """The runs differ or cannot be compared; already reported, with its own exit status."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.is_told = True


def run(argv: list[str]) -> None:
    """Compare, and raise an error if the runs differ; in a process of one of the runs, run it."""
    if take_part(JOB_VARIABLE, Job, argv, _record):
        return
    options, words = _build_parser().read_run(argv)
    command = read_flags(words)
    processes = count_processes(command.args)
    _check(command, processes, options.verify_steps)
    folder = Path(tempfile.mkdtemp(prefix="rapidformer-verify-"))
    verification = _Verification(words, command.args, options, processes, folder)
    verification.run()
    shutil.rmtree(folder)
    verification.conclude()


def _build_parser() -> CommandParser:
    parser = CommandParser(
        prog="rapidformer verify",
        usage="rapidformer verify [--verify-steps N] [--full-size] FLAGS OF A RUN",
        description="Run a few steps of a small copy of the run twice, with its switches and in "
        "one process without them, and compare losses, gradients and weights.",
        epilog="All other flags are those of the run: rapidformer --help. Exit status: 0 equal, "
        f"{DIFFERS} different, {UNDECIDED} undecided (the forward pass is random), 1 a run "
        "failed.",
        allow_abbrev=False,
    )
    parser.add("--verify-steps", "N", "steps to compare (default: 3)", default=3)
    parser.add("--full-size", "", "keep the sizes of model, rows and batches")
    parser.add(
        "--same-micro-batches", "", "give the single process the same micro-batches, not each "
        "global batch at once: for a loss that is more than a mean over labels (an "
        "expert-balancing loss)",
    )  # fmt: skip
    return parser


def _check(command: CommandLine, processes: int, updates: int) -> None:
    """Check everything that can be wrong before a process is started."""
    args = command.args
    problems = [] if updates >= 1 else [f"--verify-steps must be at least 1, got {updates}."]
    problems += find_run_problems(command, "verify")
    problems += [
        f"{switch.describe(args)} cannot be verified: {switch.why}."
        for switch in SWITCHES
        if switch.verification == "refused" and switch.is_on(args)
    ]
    data_parallel = args.data_parallel if has_own_count(args) else None
    problems += find_problems(
        args.replace("the processes to start", world_size=processes, data_parallel=data_parallel)
    )
    if not problems and not list_switches(args, processes):
        problems.append(
            "nothing to verify: these flags neither split anything nor enable a switch that could "
            "change a result. Add the switches of the run, such as --nproc-per-node 2, "
            "--zero-2-memory-optimization or --tensor-model-parallel-size 2."
        )
    raise_problems(problems)


@dataclass
class _Verification(ChildRuns):
    """The runs, one after the other, and the verdict."""

    _batch: int | None = None
    _micro_batch: int | None = None
    _is_narrow: bool | None = None
    _notes: list[str] = field(default_factory=list)
    _comparison: Comparison = field(default_factory=lambda: Comparison(quantities={}))
    _verdict: str = "equal: these switches change nothing."
    _status: int = 0

    def run(self) -> None:
        """Run what is needed: two runs, and more single-process runs to explain a difference."""
        args, processes = self.args, self.processes
        say(f"verify   {', '.join(list_switches(args, processes))}")
        for line in list_left_out(args):
            say(f"left out {line}")
        ranks = "1 process" if processes == 1 else f"{processes} processes"
        switched = self._start("switched", ranks)
        rows = max(rows for rows, _ in count_samples(switched))
        samples = switched[0].facts["samples"]  # which may have several rows: a pair has two
        self._batch = samples if samples and rows % samples == 0 else rows
        self._micro_batch = switched[0].facts["micro_batch_size"]
        say(_describe(switched, self._batch))
        is_cut = self.options.same_micro_batches
        reference = self._start("pieces" if is_cut else "whole", "one process, no switches")[0]
        self._comparison = compare(reference, switched)
        if not self._comparison.is_equal:
            self._explain(reference, switched, is_cut)

    def _explain(self, reference: Trace, switched: list[Trace], is_cut: bool) -> None:
        """Before blaming a switch: is it the cut of the batch, the forward pass or round-off?"""
        if self._comparison.causes:
            self._status, self._verdict = DIFFERS, _DIFFERENT
            return
        description = "one process, other random numbers, same micro-batches"
        again = self._start("disturbed", description, True)[0]
        if not compare(reference, [again]).has_same_samples:
            reference, is_cut = self._start("pieces", "one process, same micro-batches")[0], True
            self._notes.append(_DRAWN)
            if compare(reference, switched).is_equal:
                self._comparison = compare(reference, switched)
                return
        self._comparison = compare(reference, switched, alike=again)
        if self._comparison.is_small:
            # First of all: adding up other micro-batches rounds differently, too.
            shaken = self._start("shaken", "one process, weights changed by round-off", is_cut)[0]
            self._comparison = compare(reference, switched, noise=shaken, alike=again)
            if self._comparison.is_equal:
                self._notes.append(_CANCELLED)
                return
        self._status, self._verdict = DIFFERS, _DIFFERENT
        if not compare(reference, [again]).is_equal:
            if is_cut or not self._is_deterministic(reference):
                self._status, self._verdict = UNDECIDED, _RANDOM
                return
            if compare(again, switched).is_equal:
                self._status, self._verdict = DIFFERS, _CUT
                equal_weights = find_equal_weights(switched)
                if equal_weights is not None:
                    self._comparison.quantities["micro-batch weights"] = equal_weights
                    self._verdict = _DIFFERENT

    def _is_deterministic(self, reference: Trace) -> bool:
        disturbed = self._start("disturbed", "one process, other random numbers")
        return compare(reference, disturbed[:1]).is_equal

    def conclude(self) -> None:
        """Print the table and the verdict; raise an error if the runs differ."""
        lines = [*format_table(self._comparison), *(f"note: {note}" for note in self._notes)]
        if self._status:
            lines += describe_cause(self._comparison)
        text = "\n".join(filter(None, lines))
        sys.stdout.write(f"\n{text}\n{self._verdict}\n")
        if self.args.config and (folder := find_run(Path(self.args.config).expanduser())):
            append_event(folder, "verify", verdict=self._verdict, text=text)  # for its page
        if self._status:
            raise VerificationError(self._verdict, self._status)

    def _start(self, kind: Kind, description: str, is_cut: bool = False) -> list[Trace]:
        """Run it in new processes and read their traces."""
        processes = self.processes if kind == "switched" else 1
        job = Job(
            folder=str(self.folder), kind=kind, updates=self.options.verify_steps,
            processes=self.processes, is_full_size=self.options.full_size,
            global_batch_size=self._batch,
            micro_batch_size=self._micro_batch if is_cut or kind == "pieces" else self._batch,
        )  # fmt: skip
        if self._is_narrow is None:
            self._is_narrow = can_narrow(self.args, job)
        job = replace(job, is_narrow=self._is_narrow)
        say(f"running  {description}")
        hint = "" if self.options.full_size else " --full-size keeps the sizes of the run."
        start_run(
            ["verify", *self.words], self.args,
            processes=processes, variable=JOB_VARIABLE, job=job,
            note=f"This was the run with {description}; its output is in {self.folder}.{hint}",
        )  # fmt: skip
        return [Trace.load(job.get_path(rank)) for rank in range(processes)]


def _record(job: Job, train: Train) -> Trace:
    from rapidformer.verification.recorder import record_run

    return record_run(job, train)


def _describe(traces: list[Trace], batch: int) -> str:
    facts = traces[0].facts
    return (
        f"model    {facts['model']}, {count_parameters(traces):,} parameters, fp32 on "
        f"{facts['device']}; {count(len(traces[0].norms), 'step')} of {count(batch, 'row')}"
    )
