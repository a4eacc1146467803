"""Imports go down only, as design.md draws the rooms."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rapidformer

ROOT = Path(rapidformer.__file__).parent
# From the top to the bottom; a package may import what is below it, and its own files.
LAYERS = [
    {"preprocess_data", "__main__"},
    {"cli"},
    {"launch"},
    {"dialects"},
    {"tasks"},
    {"training", "verification", "benchmarking", "sweeping"},
    {"planning"},
    {"engine", "objectives", "report"},
    {"accel", "checkpoint"},
    {"optim"},
    {"models", "data"},
    {"dist"},
    {"compat"},
    {
        "config", "errors", "hub", "nearest", "strict_json", "log", "timers", "context", "overlay",
        "host_memory", "foreign_names", "run_events",
    },
]  # fmt: skip
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
BOTTOM = LEVEL["config"]
# The exceptions, each with its reason.
ALLOWED: dict[tuple[str, str], str] = {}
ONLY = {"launch": {"compat", "config", "errors", "run_events"}, "compat": {"log"}}
FILES = sorted(ROOT.rglob("*.py"))


def get_room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@functools.cache
def list_import_nodes(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Also those inside functions. Several tests ask for them, and parsing takes the time."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def iterate_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of ours in a file, also inside functions: (line, module)."""
    package = ["rapidformer", *path.relative_to(ROOT).with_suffix("").parts[:-1]]
    for node in list_import_nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "rapidformer":
                for alias in node.names:
                    yield node.lineno, f"rapidformer.{alias.name}"
            else:
                yield node.lineno, module


def get_module(path: Path) -> str:
    parts = ["rapidformer", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_targets(path: Path, modules: set[str]) -> Iterator[str]:
    """The modules of ours that a file imports; ``from package import module`` names the module."""
    package = ["rapidformer", *path.relative_to(ROOT).with_suffix("").parts[:-1]]
    for node in list_import_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{module}.{alias.name}"
                yield name if name in modules else module


def build_import_graph() -> dict[str, set[str]]:
    """Which module of ours imports which, anywhere: also inside functions and for types only."""
    modules = {get_module(path) for path in FILES}
    return {get_module(path): modules.intersection(find_targets(path, modules)) for path in FILES}


def is_allowed(room: str, module: str) -> bool:
    target = module.split(".")[1]
    if target == room or (room, module) in ALLOWED:
        return True
    if room in ONLY:
        return target in ONLY[room]
    if LEVEL[room] == BOTTOM:
        return LEVEL[target] == BOTTOM
    return LEVEL[target] > LEVEL[room]


def test_imports_go_down() -> None:
    paths = [path for path in FILES if path != ROOT / "__init__.py"]
    assert not {get_room(path) for path in paths} - LEVEL.keys(), "not rooms of the design"
    wrong = [
        f"{path.relative_to(ROOT)}, line {line}: {module}"
        for path in paths
        for line, module in iterate_imports(path)
        if module.startswith("rapidformer.") and not is_allowed(get_room(path), module)
    ]
    assert not wrong, "imports that go up:\n" + "\n".join(wrong)


def test_there_is_no_import_cycle() -> None:
    try:
        TopologicalSorter(build_import_graph()).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import each other: {' <- '.join(error.args[1])}")


def test_only_mpu_asks_for_the_current_topology() -> None:
    """Library code takes the topology as a parameter; ``get_topology`` is for users' scripts."""
    owners = {ROOT / "__init__.py", ROOT / "dist/topology.py", ROOT / "dist/mpu.py"}
    asking = [p for p in FILES if "get_topology" in p.read_text(encoding="utf-8")]
    assert set(asking) <= owners


def test_models_and_data_do_not_know_each_other() -> None:
    assert not is_allowed("models", "rapidformer.data.batch")
    assert not is_allowed("data", "rapidformer.models.plan")
    assert not is_allowed("optim", "rapidformer.accel.parallelize")
    assert not is_allowed("config", "rapidformer.dist.processes")
    assert is_allowed("training", "rapidformer.engine")


def test_every_exception_is_still_needed() -> None:
    used = {(get_room(path), module) for path in FILES for _, module in iterate_imports(path)}
    assert set(ALLOWED) <= used


def test_bottom_layer_does_not_import_torch() -> None:
    for path in FILES:
        if LEVEL.get(get_room(path)) == BOTTOM:
            heavy = [m for _, m in iterate_imports(path) if m.split(".")[0] in ("torch", "numpy")]
            assert not heavy, path


def test_nobody_imports_the_engine_from_below_through_the_public_names() -> None:
    """`from rapidformer import RapidformerEngine` inside the library would hide a wrong import."""
    for path in FILES:
        for line, module in iterate_imports(path):
            if module.startswith("rapidformer.") and path.parent != ROOT:
                name = module.split(".")[1]
                assert (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file(), (
                    f"{path}:{line} imports {module}"
                )


def test_there_is_no_utils_module() -> None:
    assert not [path for path in FILES if "utils" in path.stem]
