"""Kill, corrupt, fuzz and starve runs, and count what was lost. Nothing should be.

    python benchmarks/fault_campaign.py kills --runs 100

Each campaign prints a table and exits with status 1 if anything failed; what failed stays in
--folder. The same seed chooses the same faults. ``tests/faults`` runs a short form of each.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tests.faults.campaign.corruptions import run_corruptions
from tests.faults.campaign.disks import run_disks
from tests.faults.campaign.fuzz import run_fuzz
from tests.faults.campaign.kills import MOMENTS, Reference, run_kills
from tests.faults.campaign.layouts import LAYOUTS, Campaign
from tests.faults.campaign.table import format_table
from tests.warm_python import start_warm_python

from rapidformer.accel.deepspeed.package import import_deepspeed


def campaign_kills(options: argparse.Namespace) -> int:
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as place, start_warm_python(Path(place)) as python:
        kills = run_kills(
            python, options.folder, runs=options.runs, seed=options.seed, layouts=options.layouts
        )
        for number, kill in enumerate(kills, start=1):
            counts["runs", kill.layout] += 1
            counts["killed", kill.layout] += kill.was_killed
            counts[kill.moment, kill.layout] += kill.was_killed
            counts["failed", kill.layout] += bool(kill.problems)
            report(
                number, options.runs, f"{kill.layout}, {kill.moment} {kill.fault}", kill.problems
            )
    return show(counts, "layout", ["runs", "killed", *MOMENTS, "failed"])


def campaign_layouts(options: argparse.Namespace) -> int:
    counts: Counter[tuple[str, str]] = Counter()
    worst = {"without dropout": 0.0, "with dropout": 0.0}
    layouts = options.layouts or list(LAYOUTS)
    if "DeepSpeed 2" in layouts:
        # Before ranks are forked from this process: importing these takes each of them seconds.
        with ExitStack() as changes:
            import_deepspeed(torch.device("cpu"), "error", changes)
        importlib.import_module("torch._inductor.compile_fx")
    campaigns = [Campaign(options.folder / kind, 0.1 * i) for i, kind in enumerate(worst)]
    starts = options.starts or layouts
    total = min(options.runs, 2 * len(starts) * (len(layouts) + len(layouts) ** 2))
    runs = zip(*(each.run(layouts, starts) for each in campaigns), strict=True)
    for routes in islice(runs, options.runs // 2):
        for kind, route in zip(worst, routes, strict=True):
            counts["routes", kind] += 1
            counts["failed", kind] += bool(route.problems)
            worst[kind] = max(worst[kind], route.error)
            words = f"{', '.join(route.layouts)} {kind}"
            report(sum(counts["routes", kind] for kind in worst), total, words, route.problems)
    print(f"differences from uninterrupted runs: up to {worst}")
    return show(counts, "layouts", ["routes", "failed"])


def campaign_corruptions(options: argparse.Namespace) -> int:
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as place, start_warm_python(Path(place)) as python:
        run = Reference(python, options.folder / "run", "2 processes").run.save
    found = run_corruptions(run, options.folder, runs=options.runs, seed=options.seed)
    for number, each in enumerate(found, start=1):
        counts["runs", each.damage] += 1
        counts["failed", each.damage] += bool(each.problems)
        report(number, options.runs, f"{each.damage} of {each.file}", each.problems)
    return show(counts, "damage", ["runs", "failed"])


def campaign_disks(options: argparse.Namespace) -> int:
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as place, start_warm_python(Path(place)) as python:
        found = run_disks(
            python, options.folder, runs=options.runs, seed=options.seed, layouts=options.layouts
        )
        for number, each in enumerate(found, start=1):
            counts["runs", each.fault] += 1
            counts["stopped", each.fault] += each.status != 0
            counts["trained to the end", each.fault] += each.has_trained_on
            counts["failed", each.fault] += bool(each.problems)
            words = f"{each.fault}, {each.layout}, {each.where}, status {each.status}"
            report(number, options.runs, words, each.problems)
    return show(counts, "fault", ["runs", "stopped", "trained to the end", "failed"])


def campaign_fuzz(options: argparse.Namespace) -> int:
    counts: Counter[tuple[str, str]] = Counter()
    for number, each in enumerate(
        run_fuzz(options.folder, runs=options.runs, seed=options.seed), start=1
    ):
        kind = "command lines" if each.file is None else "YAML files"
        counts["runs", kind] += 1
        counts["accepted", kind] += each.status == 0
        counts["refused", kind] += each.status != 0
        counts["failed", kind] += bool(each.problem)
        if each.problem:
            report(number, options.runs, f"{each.words} {each.file or ''}", [each.problem])
    return show(counts, "input", ["runs", "accepted", "refused", "failed"])


def show(counts: Counter[tuple[str, str]], kind: str, names: list[str]) -> int:
    """Print the table, with a row for each kind; returns the number of failures."""
    kinds = list(dict.fromkeys(each for _, each in counts))
    rows: list[list[object]] = [[each, *(counts[name, each] for name in names)] for each in kinds]
    totals = [sum(counts[name, each] for each in kinds) for name in names]
    print(format_table([kind, *names], [*rows, ["all", *totals]]))
    return totals[names.index("failed")]


def report(number: int, total: int, what: str, problems: list[str]) -> None:
    """A line per fault, so that a long campaign can be followed."""
    verdict = "ok" if not problems else "FAILED\n    " + "\n    ".join(problems)
    print(f"{time.strftime('%H:%M:%S')} {number}/{total} {what}: {verdict}", flush=True)


CAMPAIGNS: dict[str, tuple[Callable[[argparse.Namespace], int], int]] = {
    "kills": (campaign_kills, 100),
    "layouts": (campaign_layouts, 2 * (len(LAYOUTS) ** 2 + len(LAYOUTS) ** 3)),
    "corruptions": (campaign_corruptions, 200),
    "disks": (campaign_disks, 60),
    "fuzz": (campaign_fuzz, 10_000),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--runs", type=int, help="faults (default: the campaign's own number)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", nargs="*", help="only these (default: all)")
    parser.add_argument(
        "--starts", nargs="*", help="layouts: only routes that begin with these (default: all)"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the runs are (default: a new one in /tmp)"
    )
    options = parser.parse_args()
    options.folder = Path(options.folder or tempfile.mkdtemp(prefix="faults-")).absolute()
    print(f"runs are in {options.folder}", flush=True)
    campaign, runs = CAMPAIGNS[options.campaign]
    options.runs = options.runs or runs
    failures = campaign(options)
    print(f"{failures} failed" if failures else "nothing failed")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
