"""Kill, corrupt, fuzz and starve runs, and count what was lost. Nothing should be.

    python benchmarks/fault_campaign.py kills --runs 100

Each campaign prints a table and exits with status 1 if anything failed; what failed stays in
--folder. The same seed chooses the same faults. ``tests/faults`` runs a short form of each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.campaign.kills import MOMENTS, run_kills
from tests.faults.campaign.table import format_table
from tests.warm_python import start_warm_python


def campaign_kills(options: argparse.Namespace) -> int:
    counts: Counter[tuple[str, str]] = Counter()
    layouts: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as place, start_warm_python(Path(place)) as python:
        kills = run_kills(
            python, options.folder, runs=options.runs, seed=options.seed, layouts=options.layouts
        )
        for number, kill in enumerate(kills, start=1):
            layouts[kill.layout] = None
            counts["runs", kill.layout] += 1
            counts["killed", kill.layout] += kill.was_killed
            counts[kill.moment, kill.layout] += kill.was_killed
            counts["failed", kill.layout] += bool(kill.problems)
            report(
                number, options.runs, f"{kill.layout}, {kill.moment} {kill.fault}", kill.problems
            )
    names = ["runs", "killed", *MOMENTS, "failed"]
    rows = [[layout, *(counts[name, layout] for name in names)] for layout in layouts]
    rows.append(["all", *(sum(counts[name, layout] for layout in layouts) for name in names)])
    print(format_table(["layout", *names], rows))
    return int(rows[-1][-1])


def report(number: int, total: int, what: str, problems: list[str]) -> None:
    """A line per fault, so that a long campaign can be followed."""
    verdict = "ok" if not problems else "FAILED\n    " + "\n    ".join(problems)
    print(f"{time.strftime('%H:%M:%S')} {number}/{total} {what}: {verdict}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("campaign", choices=["kills"])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", nargs="*", help="only these (default: all)")
    parser.add_argument(
        "--folder", type=Path, help="where the runs are (default: a new one in /tmp)"
    )
    options = parser.parse_args()
    options.folder = Path(options.folder or tempfile.mkdtemp(prefix="faults-")).absolute()
    print(f"runs are in {options.folder}", flush=True)
    failures = {"kills": campaign_kills}[options.campaign](options)
    print(f"{failures} failed" if failures else "nothing failed")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
