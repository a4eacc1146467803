"""transformers' ``tests/trainer`` with our ``Trainer`` and ``TrainingArguments``.

A copy of the folder is run; only its import lines differ. With ``--theirs`` nothing differs, so
that a test which cannot pass here (it needs a GPU or a file of the Hub) is told from one that fails
with ours alone. Needs ``pip install parameterized``.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

NAMES = ("Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments")


def rewrite(source: str) -> str:
    """The source with transformers' trainers imported from rapidformer."""
    lines = source.splitlines()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    for node in sorted(found, key=lambda node: -node.lineno):
        ours = [name for name in node.names if name.name in NAMES]
        if node.level or not (node.module or "").startswith("transformers") or not ours:
            continue
        theirs = [name for name in node.names if name not in ours]
        made = [ast.unparse(ast.ImportFrom("rapidformer", ours, 0))]
        if theirs:
            made.insert(0, ast.unparse(ast.ImportFrom(node.module, theirs, 0)))
        indent = " " * node.col_offset
        lines[node.lineno - 1 : node.end_lineno] = [indent + line for line in made]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="run.py transformers", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", help="in tests/trainer; all by default")
    parser.add_argument("--theirs", action="store_true", help="leave the import lines alone")
    parser.add_argument("-k", default="", help="pytest's -k")
    parser.add_argument("--seconds", type=int, default=120, help="for one test")
    parser.add_argument("--details", action="store_true", help="show pytest's own output")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        tests = Path(place) / "tests"
        shutil.copytree(asked.folder, tests)
        trainer = tests / "trainer"
        if not asked.theirs:
            for path in trainer.glob("*.py"):
                path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")
        known = [*sorted(p.name for p in trainer.glob("test_train*.py"))]
        report = Path(place) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", place,
            "--timeout", str(asked.seconds), f"--junitxml={report}", "-k", asked.k,
            *(str(trainer / name) for name in asked.files or known),
        ]  # fmt: skip
        ran = subprocess.run(
            command, cwd=place, check=False, text=True,
            stdout=None if asked.details else subprocess.DEVNULL,
        )  # fmt: skip
        if not report.is_file():
            print(f"pytest ended with {ran.returncode} and no report; try --details")
            return 2
        return _print_counts(report)


def _print_counts(report: Path) -> int:
    """One line per test that did not pass, then the counts of each file."""
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                reason = (child.get("message") or "").partition("\n")[0]
        where = (case.get("classname") or "").removeprefix("tests.trainer.")
        counts.setdefault(where.partition(".")[0], Counter())[outcome] += 1
        if outcome == "failed":
            print(f"{where}.{case.get('name')}: {reason[:150]}")
    for name, found in {**counts, "all": sum(counts.values(), Counter())}.items():
        numbers = [f"{found[kind]} {kind}" for kind in ("passed", "failed", "skipped")]
        print(f"{name}: {', '.join(numbers)}")
    return 0
