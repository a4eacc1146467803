"""Docs that are made from the code are fresh; links between pages lead somewhere."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def _load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_fresh() -> None:
    generator = _load_generator()
    hint = "run: python docs/generate.py"
    assert (ROOT / "docs" / "settings.md").read_text() == generator.render_settings(), hint
    assert (ROOT / "docs" / "tasks.md").read_text() == generator.render_tasks(), hint
    for page in {page for page, _ in generator.TABLES}:
        text = (ROOT / "docs" / page).read_text()
        assert text == generator.fill_tables(page, text), hint


def test_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


BUILD = """
import gc

gc.disable()

import griffe
from mkdocs.__main__ import cli

def keep(find):
    found = {}

    def find_once(self):
        if id(self) not in found:
            found[id(self)] = self, find(self)
        return found[id(self)][1]

    return property(find_once)

for kind in (griffe.Object, griffe.Alias):
    kind.inherited_members = keep(kind.inherited_members.fget)
cli()
"""
"""Without collections of garbage, which take a quarter of the time; and what a class inherits is
found once, not for each of its members. The pages are the same, byte for byte."""


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    # Not --quiet: it hides warnings from --strict, too.
    command = [sys.executable, "-c", BUILD, "build", "--strict", "-d", str(tmp_path)]
    # To format a signature, a process is started: for all of them, that is half of the time.
    # What is searched for is cut out of finished pages, and colours are put into them: neither says
    # anything about them.
    left_out = dict.fromkeys(("SEPARATE_SIGNATURES", "SEARCH_INDEX", "HIGHLIGHT_CODE"), "false")
    shorter = {**os.environ, **left_out}
    built = subprocess.run(
        command, cwd=ROOT, env=shorter, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "index.html").is_file()


def _list_flags(parser: argparse.ArgumentParser) -> set[str]:
    flags = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags = flags.union(*map(_list_flags, action.choices.values()))
    return flags


def test_flags_in_the_docs_exist() -> None:
    from rapidformer.cli import (
        bench,
        check,
        data,
        data_show,
        export,
        plan,
        preprocess,
        report,
        runs,
        sweep,
        verify,
    )
    from rapidformer.config import build_parser
    from rapidformer.dialects.flags import FLAGS
    from rapidformer.foreign_names import find_names

    known = {"--help", "--print-config", "--version"}
    for parser in (
        build_parser(),
        data._build_parser(),
        data_show.build_parser(),
        export._build_parser(),
        preprocess._build_parser(),
        verify._build_parser(),
        report.build_parser(),
        runs.build_parser(),
        check.build_parser(),
        bench._build_parser(),
        sweep._build_parser(),
        plan._build_parser(),
    ):
        known |= _list_flags(parser)
    others = {"--constraint", "--nproc_per_node", "--yes"}
    benchmarks = {
        "--limit",
        "--first-steps",
        "--peer-part",
        "--prompts",
        "--rows",
        "--runs",
        "--size",
        "--starts",
        "--steps",
        "--together",
        "--tokens",
        "--warm-up",
        "--workloads",
    }
    others |= benchmarks
    others |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--requeue", "--signal"}  # Slurm
    others |= {
        "--" + name.replace("_", "-") for name in find_names(FLAGS.names, "refused")
    }  # listed with the reason
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+[a-z0-9]", page.read_text()):
            assert flag in known | others, f"{page.name} shows {flag}"


def test_every_public_name_is_in_the_reference() -> None:
    import rapidformer

    pages = (ROOT / "docs" / "api").glob("*.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    listed = {line.removeprefix("::: rapidformer.") for line in text.splitlines()}
    # A class under a second name, kept for scripts that spell it so.
    assert set(rapidformer.__all__) - listed == {"Pretrainer"}
