"""Private names of other libraries are used in ``compat/`` only, and each one is still there; the
private methods that our classes override are listed there too.

What counts as a use: an import of a private module or name, and an access ``object._name`` (or its
spelling in ``getattr``) where no class of ours defines ``_name``, or where the object is not
``self`` and torch's or transformers' own classes have an attribute of that name.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import rapidformer
from rapidformer.compat import OVERRIDDEN

ROOT = Path(rapidformer.__file__).parent
COMPAT = ROOT / "compat"
FILES = sorted(ROOT.rglob("*.py"))
# The standard library's, with the reason why each may be used anywhere.
ALLOWED = {
    "_fields": "documented: how to know a named tuple",
    "_asdict": "documented: a named tuple's",
    "_replace": "documented: a named tuple's",
    "_make": "documented: a named tuple's",
    "_exit": "documented: os._exit",
    "_option_string_actions": "argparse's only list of flags, the same since Python 2.7",
}
GETTERS = {"getattr", "setattr", "hasattr", "delattr"}


@pytest.fixture(autouse=True, scope="module")
def _without_collections() -> Iterator[None]:
    """700,000 nodes are made and kept: looking for garbage among them takes half of the time."""
    gc.disable()
    yield
    gc.enable()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


@functools.cache
def list_nodes(path: Path) -> list[ast.AST]:
    """Of a whole file: several tests look at all of them."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def find_own_attributes() -> frozenset[str]:
    """Attributes that some class of ours defines: in its body, or by ``self.name = ...``."""
    found: set[str] = set()
    for node in (node for path in FILES for node in list_nodes(path)):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.add(each.name)
                elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    found.add(each.target.id)
                elif isinstance(each, ast.Assign):
                    found |= {t.id for t in each.targets if isinstance(t, ast.Name)}
        elif isinstance(getattr(node, "ctx", None), ast.Store) and is_self(
            getattr(node, "value", node)
        ):
            found.add(getattr(node, "attr", ""))
    return frozenset(found)


@functools.cache
def find_foreign_attributes() -> frozenset[str]:
    classes = (Tensor, nn.Module, Optimizer, LRScheduler, transformers.PreTrainedModel)
    return frozenset(name for cls in classes for name in dir(cls) if is_private(name)) | frozenset(
        vars(nn.Module())
    )


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_foreign(owner: ast.expr, name: str) -> bool:
    if not is_private(name) or name in ALLOWED:
        return False
    if name not in find_own_attributes():
        return True
    return not is_self(owner) and name in find_foreign_attributes()


def find_uses(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, name) of every private name of another library."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if any(is_private(part) for part in alias.name.split(".")):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level or module.split(".")[0] in ("rapidformer", "__future__"):
                continue
            for alias in node.names:
                name = f"{module}.{alias.name}"
                if any(is_private(part) for part in name.split(".")):
                    yield node.lineno, name
        elif (isinstance(node, ast.Attribute) and is_foreign(node.value, node.attr)) or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in GETTERS
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
            and is_foreign(node.args[0], str(node.args[1].value))
        ):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            if is_private(name) and name in find_foreign_attributes() and name not in ALLOWED:
                yield node.lineno, repr(name)


def test_private_names_are_used_in_compat_only() -> None:
    uses = [
        f"{path.relative_to(ROOT)}, line {line}: {name}"
        for path in FILES
        if path.parent != COMPAT
        for line, name in find_uses(list_nodes(path))
    ]
    assert not uses, (
        "private names of other libraries are used. Give each a thin function in compat/, named "
        "for what it does, and a line in PRIVATE_NAMES there:\n" + "\n".join(uses)
    )


@pytest.mark.parametrize(
    "text",
    [
        "from torch._C import x",
        "import torch._dynamo",
        "from torch.distributed.tensor.placement_types import _StridedShard",
        "torch._foreach_norm(x)",
        "module._buffers['a'] = 1",
        "model._modules.pop('a')",
        "getattr(model, '_tp_plan', None)",
        "HOOKS = ('_forward_hooks',)",
    ],
)
def test_a_private_name_is_found(text: str) -> None:
    assert list(find_uses(ast.walk(ast.parse(text))))


# ---- are they still there ------------------------------------------------------------------------


def list_private_names() -> list[Any]:
    found = []
    for path in sorted(COMPAT.glob("*.py")):
        if path.name != "__init__.py":
            names = importlib.import_module(f"rapidformer.compat.{path.stem}").PRIVATE_NAMES
            found += [pytest.param(path.name, *item, id=item[0]) for item in names.items()]
    return found


def find_object(path: str) -> Any:
    """What a dotted path names; raises ImportError or AttributeError where there is nothing."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for position, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part) and inspect.ismodule(found):
            importlib.import_module(".".join(parts[:position]))
        found = getattr(found, part)
    return found


def is_there(path: str) -> bool:
    try:
        find_object(path)
    except (ImportError, AttributeError):
        pass
    else:
        return True
    # An attribute that instances have: the class's own source gives it its value.
    owner, _, name = path.rpartition(".")
    try:
        classes = inspect.getmro(find_object(owner))
    except (ImportError, AttributeError):
        return False
    return any(name in get_source(cls) for cls in classes if cls is not object)


@functools.cache
def get_source(cls: type) -> str:
    """Python parses a whole file to find a class in it: once for all of its names."""
    return inspect.getsource(cls)


@pytest.mark.parametrize(("file", "name", "purpose"), list_private_names())
def test_a_private_name_is_still_there(file: str, name: str, purpose: str) -> None:
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    # Where versions differ, either name will do.
    assert any(is_there(each) for each in name.split(" or ")), (
        f"{name} has moved: used for {purpose} (compat/{file})"
    )


def test_a_name_that_has_moved_is_noticed() -> None:
    assert not is_there("torch._no_such_function")
    assert not is_there("torch.nn.Module._no_such_attribute")
    assert not is_there("torch._no_such_module.name")


@pytest.mark.parametrize("path", sorted(COMPAT.glob("[a-z]*.py")), ids=lambda path: path.name)
def test_every_private_name_in_compat_is_listed(path: Path) -> None:
    listed = {
        part
        for name in (
            *importlib.import_module(f"rapidformer.compat.{path.stem}").PRIVATE_NAMES,
            *OVERRIDDEN,
        )
        for part in name.replace(" or ", ".").split(".")
    }
    used = {
        part
        for _, text in find_uses(list_nodes(path))
        for node in ast.walk(ast.parse(text))
        for part in (getattr(node, "attr", ""), getattr(node, "id", ""), getattr(node, "value", ""))
        if isinstance(part, str) and is_private(part) and not hasattr(ast, part)
    }
    missing = sorted(used - listed - {"_aten"})
    assert not missing, f"compat/{path.name} uses {missing}: add them to PRIVATE_NAMES"


# ---- overridden methods --------------------------------------------------------------------------


@functools.cache
def find_overrides() -> list[tuple[str, type, str]]:
    """(where, class, name) of every private name of another library that a class of ours defines.

    A method that no base has in this version is not noticed: see ``compat/__init__.py``.
    """
    found = []
    for path in FILES:
        classes = [node for node in list_nodes(path) if isinstance(node, ast.ClassDef)]
        names = {node.name: set(list_members(node)) for node in classes if node.bases}
        if not any(names.values()):
            continue
        module = ".".join(("rapidformer", *path.relative_to(ROOT).with_suffix("").parts))
        for name, members in names.items():
            if members:
                cls = getattr(importlib.import_module(module), name)
                for member in filter(functools.partial(is_override, cls), members):
                    found.append((f"{path.relative_to(ROOT)}: {name}.{member}", cls, member))
    return found


def list_members(node: ast.ClassDef) -> Iterator[str]:
    """The private names that the body of a class defines."""
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [statement.name]
        elif isinstance(statement, ast.Assign):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        else:
            continue
        yield from filter(is_private, names)


def is_override(cls: type, name: str) -> bool:
    """Whether a class beneath, which is not ours, has the name."""
    others = (base for base in cls.__mro__[1:] if not base.__module__.startswith("rapidformer."))
    return any(name in vars(base) for base in others)


def test_every_overridden_method_is_listed() -> None:
    listed = [path.rpartition(".") for path in OVERRIDDEN if is_there(path)]
    owners = [(find_object(owner), name) for owner, _, name in listed]
    missing = [
        where
        for where, cls, member in find_overrides()
        if not any(name == member and issubclass(cls, owner) for owner, name in owners)
    ]
    assert not missing, "private methods are overridden: list them in OVERRIDDEN:\n" + "\n".join(
        missing
    )


def test_an_override_is_found() -> None:
    """And one of a class of ours is not."""
    found = {where for where, _, _ in find_overrides()}
    assert "models/gpt/model.py: GPTModel._init_weights" in found
    assert "launch/agent.py: Agent._shutdown" in found
    node = ast.parse("class Stage(PipelineStage):\n    _x = 1\n    def _y(self): ...").body[0]
    assert isinstance(node, ast.ClassDef) and list(list_members(node)) == ["_x", "_y"]
    assert is_override(type("Block", (nn.Module,), {}), "_call_impl")
    assert not is_override(type("Block", (nn.Module,), {}), "_of_our_own")


@pytest.mark.parametrize(("path", "reason"), OVERRIDDEN.items())
def test_an_overridden_method_is_still_there(path: str, reason: str) -> None:
    limit = re.match(r"before torch (2\.\d+): ", reason)
    is_gone = limit is not None and Version(torch.__version__) >= Version(limit[1])
    assert is_there(path) != is_gone, f"{path}: overridden for {reason}"


def test_overrides_take_what_the_overridden_methods_take() -> None:
    for where, cls, member in find_overrides():
        ours = vars(cls)[member]
        others = [base for base in cls.__mro__[1:] if member in vars(base)]
        theirs = vars(others[0])[member]
        if inspect.isfunction(ours) and inspect.isfunction(theirs):
            names = list(inspect.signature(theirs).parameters)
            taken = inspect.signature(ours).parameters
            takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
            assert takes_all or list(taken)[: len(names)] == names, where
