"""Accelerate's own tests with our ``Accelerator``, and the functions of its scripts on 2 processes.

    python -m tests.borrowed.accelerate_tests FOLDER [name ...]

FOLDER is Accelerate's repository at the tag of the installed version, as far as ``tests`` and
``src/accelerate/test_utils/scripts`` go. Only import lines are changed: a name that rapidformer has
as well is imported from it, the others stay Accelerate's. Names choose files and functions.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import rapidformer
from tests import processes

FILES = ("test_accelerator.py", "test_state_checkpointing.py")
SCRIPTS = ("test_script.py", "test_sync.py", "test_distributed_data_loop.py", "test_ops.py")
PARAMETERIZED = '''
"""What these tests use of the package ``parameterized``."""
import inspect, sys

class parameterized:
    @staticmethod
    def expand(cases, name_func=None):
        def decorate(function):
            scope = inspect.currentframe().f_back.f_locals
            for number, case in enumerate(cases):
                values = case if isinstance(case, tuple) else (case,)
                def run(self, values=values):
                    return function(self, *values)
                scope[f"{function.__name__}_{number}"] = run
        return decorate

def parameterized_class(names, cases, class_name_func=None):
    def decorate(cls):
        scope = sys.modules[cls.__module__].__dict__
        for number, case in enumerate(cases):
            name = f"{cls.__name__}_{number}"
            tests = {test: vars(cls)[test] for test in vars(cls) if test.startswith("test")}
            scope[name] = type(name, (cls,), {**tests, **dict(zip(names, case))})
        for name in [name for name in vars(cls) if name.startswith("test")]:
            delattr(cls, name)
        return cls
    return decorate
'''


def rewrite(source: str) -> str:
    """The source with the names that are ours imported from rapidformer."""
    lines = source.splitlines()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    for node in sorted(found, key=lambda node: -node.lineno):
        ours = [name for name in node.names if name.name in rapidformer.__all__]
        if not (node.module or "").startswith("accelerate") or not ours:
            continue
        theirs = [name for name in node.names if name not in ours]
        made = [ast.unparse(ast.ImportFrom("rapidformer", ours, 0))]
        if theirs:
            made.insert(0, ast.unparse(ast.ImportFrom(node.module, theirs, 0)))
        lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in made]
    return "\n".join(lines) + "\n"


def run_tests(folder: Path, place: Path, chosen: list[str]) -> Iterator[tuple[str, str, str]]:
    """File, test and what went wrong, if anything, of the tests that pytest runs."""
    tests = place / "tests"
    tests.mkdir()
    if importlib.util.find_spec("parameterized") is None:
        (tests / "parameterized.py").write_text(PARAMETERIZED, encoding="utf-8")
    for name in FILES:
        (tests / name).write_text(rewrite((folder / "tests" / name).read_text()), encoding="utf-8")
    # Here the tests of one file come as a class; a test is skipped where it needs a GPU.
    wanted = [name for name in chosen if name not in FILES]
    files = [name for name in FILES if name in chosen] or list(FILES)
    report = place / "report.xml"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={place}",
        f"--junitxml={report}", "--timeout=120", "-k", " or ".join(wanted), *files,
    ]  # fmt: skip
    subprocess.run(command, cwd=tests, check=False, stdout=subprocess.DEVNULL)
    for case in ElementTree.parse(report).iter("testcase"):
        faults = [child for child in case if child.tag in ("failure", "error", "skipped")]
        reason = "".join(
            "skipped" if child.tag == "skipped" else child.get("message") or "?" for child in faults
        )
        file, _, cls = (case.get("classname") or "").removeprefix("tests.").partition(".")
        yield f"{file}.py", f"{cls}.{case.get('name')}", reason


def run_scripts(folder: Path, place: Path, chosen: list[str]) -> Iterator[tuple[str, str, str]]:
    """The same for the functions of the scripts."""
    processes.PATIENCE = 60
    os.chdir(place)
    for file in SCRIPTS:
        path = place / file
        source = (folder / "src/accelerate/test_utils/scripts" / file).read_text()
        path.write_text(rewrite(source), encoding="utf-8")
        if path.read_text(encoding="utf-8") == source:
            continue  # nothing in it is ours
        names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        for name in names:
            is_check = name.startswith(("test_", "check_")) or name.endswith("_check")
            if not is_check or name == "check_model_parameters":
                continue
            if chosen and file not in chosen and name not in chosen:
                continue
            reason = ""
            try:
                processes.run_in_processes(call, 2, str(path), name)
            except AssertionError as error:
                lines = [line for line in str(error).splitlines() if line and line[0] != " "]
                reason = lines[-1] if lines else "?"
            yield file, name, reason


def call(path: str, name: str) -> None:
    """One function of a script, after what its ``main`` does first; runs in every process."""
    module = _load(Path(path))
    accelerator, function = rapidformer.Accelerator(), getattr(module, name)
    given = {
        "accelerator": accelerator,
        "state": module.PartialState() if hasattr(module, "PartialState") else None,
        "datasets_Dataset": None,
        "data_loader": None,
    }
    asked = {key: given[key] for key in inspect.signature(function).parameters if key in given}
    if "datasets_Dataset" in asked:
        import datasets

        asked["datasets_Dataset"] = datasets.Dataset
    if "data_loader" not in asked:
        function(**asked)
        return
    for build in _list_loaders(module):
        function(**{**asked, "data_loader": build()})


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _list_loaders(module: ModuleType) -> list[Callable[[], Any]]:
    """The loaders with which the script's ``main`` calls its function."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    rows, size = module.DummyDataset(), module.BATCH_SIZE
    return [
        lambda: DataLoader(rows, shuffle=False, batch_size=size),
        lambda: DataLoader(rows, shuffle=True, batch_size=size),
        lambda: DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows), size, False)),
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--without-scripts", action="store_true")
    asked = parser.parse_args(arguments)
    place = Path(tempfile.mkdtemp())
    counts: dict[str, Counter[str]] = {}
    kinds = [run_tests] if asked.without_scripts else [run_tests, run_scripts]
    try:
        for run in kinds:
            for file, name, reason in run(asked.folder.absolute(), place, asked.names):
                outcome = "skipped" if reason == "skipped" else "fail" if reason else "pass"
                counts.setdefault(file, Counter())[outcome] += 1
                if outcome == "fail":
                    print(f"{file} {name}: {reason.splitlines()[0][:160]}", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    for file, found in counts.items():
        print(f"{file}: {found['pass']} pass, {found['fail']} fail, {found['skipped']} skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
