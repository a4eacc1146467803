"""Find side effects in a forward step: Python code that a replayed graph would leave out.

A step may compute with its arguments, constants, modules and calls known to be pure
(``pure_calls.py``), but whatever else it calls or changes, such as a counter, a log or a queue,
would silently stop working. So its source is read, and every name in it looked up; what cannot be
judged counts as a side effect. What the code reads from outside, such as ``self.rate``, a global
function or anything that a module holds (``host_state.py``), may change later: a graph is valid
only for what it was recorded with.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rapidformer.config import Settings
from rapidformer.models.side_effects.host_state import (
    CONSTANTS,
    HostState,
    is_configuration,
    is_watched,
)
from rapidformer.models.side_effects.pure_calls import (
    DRAWS,
    MUTATORS,
    PURE_BUILTINS,
    PURE_METHODS,
    WAITS,
    get_full_name,
    is_from_library,
    is_pure,
    only_holds_data,
)
from rapidformer.overlay import get_own_class

_MOVE = "move it into a callback (on_step_end)"
_COUNT = "count in a callback (on_step_end), or keep a tensor and change that in place"
_READ = "return the tensor as a part, (loss, n, {name: tensor}), and read it in a callback (on_log)"
_DRAW = "draw on the device: torch.rand(..., device=loss.device)"
_JOIN = "make it a part of the model, so that the optimizer and checkpoints have it"
_WHOLE = "compose that model without ZeRO"
_MISSING = object()

Description = tuple[int, tuple[Hashable, ...]]
"""A number for what modules hold, and what functions read from elsewhere."""


class SideEffectError(Exception):
    """The first thing that a replay would leave out, where it is, and what to do about it."""

    def __init__(self, what: str, advice: str = _MOVE, place: str = "") -> None:
        """``place`` is ``my.py:41``, for example."""
        super().__init__(what)
        self.what, self.advice, self.place = what, advice, place
        self.is_ours = False

    def __str__(self) -> str:
        what = f"{self.place} {self.what}".lstrip()
        return f"{what} (a replay does not run Python code): {self.advice}"


class Examination:
    """What was found in the code of forward steps and modules; ``check_*`` raise what they find."""

    def __init__(self, steps: Iterable[Callable[..., Any]], model: nn.Module) -> None:
        self._seen: set[Any] = set()
        self._values: list[tuple[str, Callable[[], Any]]] = []
        self._instances: dict[type, list[nn.Module]] = defaultdict(list)
        self._model = model
        self._own_parameters = {id(parameter) for parameter in model.parameters()}
        self.modules: dict[nn.Module, None] = {}
        """Those of the model, and others that the code calls, such as a criterion."""
        self.effect: SideEffectError | None = None
        """What the code does besides computing; None if nothing."""
        checks = [functools.partial(self.check_function, step) for step in steps]
        for check in (functools.partial(self._add, model), *checks):
            try:
                check()
            except SideEffectError as effect:
                self.effect = self.effect or effect
        self._state = HostState(self.modules)

    def describe(self) -> Description:
        """What the code can see apart from its batch and the weights: a graph is valid for that."""
        values = (read() for _, read in self._values)
        seen = ((v.data_ptr(), v.shape) if isinstance(v, torch.Tensor) else v for v in values)
        return self._state.describe(), tuple(seen)

    def find_changing(self, before: Description, now: Description) -> str:
        """The name of what differs between two results of ``describe``."""
        values = zip(self._values, before[1], now[1], strict=True)
        names = (name for (name, _), old, new in values if old != new)
        return next(names, "") or self._state.find_changing(before[0], now[0])

    def read_values(self) -> list[tuple[str, Any]]:
        """What functions read from elsewhere, by name, but tensors and the mode."""
        values = ((name, read()) for name, read in self._values if name != "self.training")
        return [(name, value) for name, value in values if not isinstance(value, torch.Tensor)]

    @property
    def reads_tensors(self) -> bool:
        """Whether the code reads tensors that are neither in its batch nor weights of the model."""
        return any(_is_state(read()) for _, read in self._values)

    def list_tensors(self) -> list[torch.Tensor]:
        """Tensors that the code may change in place: buffers, and those it reads from outside."""
        buffers = (buffer for module in self.modules for buffer in module.buffers(recurse=False))
        outside = (value for value in (read() for _, read in self._values) if _is_state(value))
        return list({id(tensor): tensor for tensor in (*buffers, *outside)}.values())

    def _add(self, root: nn.Module) -> None:
        """Check a module and those inside it, unless that was done before."""
        new = [module for module in root.modules() if module not in self.modules]
        self.modules |= dict.fromkeys(new)
        if any(id(p) not in self._own_parameters and p.requires_grad for p in root.parameters()):
            name = type(root).__name__
            raise SideEffectError(f"uses a {name} with trainable weights outside the model", _JOIN)
        if root is not self._model and any(isinstance(module, FSDPModule) for module in new):
            name = get_own_class(root).__name__
            raise SideEffectError(f"calls a {name} whose weights ranks gather together", _WHOLE)
        for module in new:
            self._instances[get_own_class(module)].append(module)
        for function in _list_own_code(new):
            self.check_function(function)

    def check_function(self, function: Any, name: str = "") -> None:
        """Check a function by its source, unless it is listed; ``name`` is what code calls it."""
        if isinstance(function, functools.partial):
            self.check_function(function.func)
            for value in (*function.args, *function.keywords.values()):
                self.check_value(functools.partial(lambda same: same, value), "an argument")
            return
        owner = function.__self__ if isinstance(function, MethodType) else None
        function = getattr(function, "__func__", function)
        while is_from_library(function) and hasattr(function, "__wrapped__"):
            function = function.__wrapped__  # torch.no_grad() and the like around other code
        if is_pure(function) or function in self._seen:
            return
        if is_from_library(function):
            raise SideEffectError(f"calls {name or get_full_name(function)}()")
        self._seen.add(function)
        _Reader(self, function, owner).read()

    def check_method(self, name: str, *, is_called: bool) -> None:
        """Check ``x.name`` for an unknown ``x``: in all of the user's modules that have it."""
        is_known = name in PURE_METHODS
        for cls, instances in self._instances.items():
            member = inspect.getattr_static(cls, name, None)
            if not isinstance(member, (FunctionType, property)):
                continue
            if not is_pure(cls):
                self.check_attribute(instances[-1], name)
                is_known = True
            elif isinstance(member, FunctionType) and not is_known:
                raise SideEffectError(f"uses {cls.__name__}.{name}")
        if name in WAITS:
            raise SideEffectError(f"calls .{name}(), which waits for the GPU", _READ)
        if not all(is_watched(vars(module).get(name)) for module in self.modules):
            raise SideEffectError(f"uses .{name} of a module, which may change unseen")
        parts = (getattr(module, name, None) for module in self.modules)
        if is_called and not is_known and not any(isinstance(part, nn.Module) for part in parts):
            raise SideEffectError(f"calls .{name}(), which is not known to compute only")

    def check_attribute(self, owner: Any, name: str) -> None:
        """Check ``self.name``: a method or property is read, and a value is noted."""
        member = inspect.getattr_static(type(owner), name, None)
        if isinstance(member, property):
            if member.fget is not None:
                self.check_function(MethodType(member.fget, owner))
        elif isinstance(member, functools.cached_property):
            self.check_function(MethodType(member.func, owner))
        elif isinstance(member, FunctionType) and name not in vars(owner):
            self.check_function(MethodType(member, owner))
        else:
            # The code is the same for all instances of a class; each may have another value.
            for each in self._instances.get(get_own_class(owner), [owner]):
                self.check_value(functools.partial(getattr, each, name, None), f"self.{name}")

    def check_value(self, read: Callable[[], Any], name: str) -> None:
        """Check what a function reads from outside, and note it if its value may change."""
        value = read()
        if isinstance(value, (nn.Module, FunctionType, MethodType, functools.partial)):
            self._values.append((name, read))  # another one may take its place
        if isinstance(value, nn.Module):
            self._add(value)
        elif isinstance(value, torch.Tensor) and value.requires_grad:
            if id(value) not in self._own_parameters:
                raise SideEffectError(f"uses {name}, a trainable weight outside the model", _JOIN)
        elif isinstance(value, torch.Tensor) or _is_constant(value):
            self._values.append((name, read))
        elif isinstance(value, (FunctionType, MethodType, functools.partial, BuiltinFunctionType)):
            self.check_function(value, name)
        elif not isinstance(value, Settings) and not _is_pure_class(value):
            raise SideEffectError(f"uses {name}")


class _Reader(ast.NodeVisitor):
    """Reads the source of one function."""

    def __init__(self, examination: Examination, function: FunctionType, owner: Any) -> None:
        self._examination, self._function, self._owner = examination, function, owner
        code = function.__code__
        has_self = owner is not None and code.co_argcount
        self._self = code.co_varnames[0] if has_self else None
        """The name of the first parameter."""
        self._called: ast.AST | None = None
        self._line, self._file = 1, _shorten(code.co_filename)
        self._locals: set[str] = set()
        self._is_ours = function.__globals__.get("__name__", "").startswith("rapidformer.")

    def read(self) -> None:
        function = self._function
        try:
            # Of the code itself: for a function, Python looks below its decorators.
            lines, self._line = inspect.getsourcelines(function.__code__)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, SyntaxError, TypeError):
            problem = f"uses {function.__qualname__}, whose source is not there"
            raise SideEffectError(problem) from None
        self._locals = _list_locals(tree)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(isinstance(value, (list, dict, set)) for value in defaults):
            place = f"{self._file}:{self._line}"
            raise SideEffectError("has a default argument that may change", _COUNT, place)
        self.visit(tree)

    def visit(self, node: ast.AST) -> None:
        try:
            self._refuse(node)
            super().visit(node)
        except SideEffectError as effect:
            # The innermost line of the user's own: below it, the code is ours.
            is_outer = effect.is_ours and not self._is_ours
            if hasattr(node, "lineno") and (not effect.place or is_outer):
                effect.place = f"{self._file}:{self._line + node.lineno - 1}"
                effect.is_ours = self._is_ours
            raise

    def _refuse(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            raise SideEffectError(f"changes {node.names[0]}", _COUNT)
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFunctionDef)):
            raise SideEffectError("is not in an ordinary function", "return the loss instead")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.body, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(part)  # not its annotations and decorators

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        for part in filter(None, (node.target, node.value)):
            self.visit(part)

    def visit_Call(self, node: ast.Call) -> None:
        callee = self._find(node.func)
        is_on_host = not any(keyword.arg in ("device", None) for keyword in node.keywords)
        if callable(callee) and isinstance(callee, Hashable) and callee in DRAWS and is_on_host:
            raise SideEffectError(f"calls {ast.unparse(node.func)}() on the host", _DRAW)
        if _is_name(node.func, "getattr"):
            if not (len(node.args) > 1 and isinstance(node.args[1], ast.Constant)):
                raise SideEffectError("looks up an attribute by a computed name")
            self._examination.check_method(str(node.args[1].value), is_called=False)
        self._called = node.func
        self.generic_visit(node)

    def _is_of_self(self, node: ast.AST) -> bool:
        """Whether it is an attribute of ``self``, which is looked at as such."""
        return isinstance(node, ast.Attribute) and _is_name(node.value, self._self)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        is_called = self._called is node
        if not isinstance(node.ctx, ast.Load):
            raise SideEffectError(f"changes {ast.unparse(node)}", _COUNT)
        is_part = isinstance(node.value, (ast.Attribute, ast.Subscript))
        if is_called and node.attr in MUTATORS and is_part and not self._is_of_self(node.value):
            raise SideEffectError(f"changes {ast.unparse(node.value)}", _COUNT)
        holder = self._find(node.value)
        # A class that only holds data may be a place for settings: Config.weight.
        is_place = isinstance(holder, type) and only_holds_data(holder)
        if isinstance(holder, ModuleType) or is_configuration(holder) or is_place:
            read = functools.partial(getattr, holder, node.attr, None)
            self._examination.check_value(read, ast.unparse(node))
        elif self._is_of_self(node):
            self._examination.check_attribute(self._owner, node.attr)
        elif isinstance(node.value, ast.Call) and _is_name(node.value.func, "super"):
            for method in (vars(cls).get(node.attr) for cls in type(self._owner).__mro__):
                if isinstance(method, FunctionType):
                    self._examination.check_function(MethodType(method, self._owner))
        else:
            self.visit(node.value)
            self._examination.check_method(node.attr, is_called=is_called)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        is_local = isinstance(node.value, ast.Name) and node.value.id in self._locals
        if not isinstance(node.ctx, ast.Load) and not is_local:
            raise SideEffectError(f"changes {ast.unparse(node)}", _COUNT)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Check a name that a function does not define: from its closure, a global or a builtin."""
        if node.id in self._locals or node.id == "__class__":
            return
        read = self._find_outside(node.id)
        if read is not None:
            self._examination.check_value(read, node.id)
        elif node.id not in PURE_BUILTINS:
            is_called = self._called is node
            raise SideEffectError(f"calls {node.id}()" if is_called else f"uses {node.id}")

    def _find_outside(self, name: str) -> Callable[[], Any] | None:
        function = self._function
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        if name in cells:
            return lambda: cells[name].cell_contents
        if name in function.__globals__:
            return lambda: function.__globals__[name]
        return None

    def _find(self, node: ast.AST) -> Any:
        """The value of a dotted name that leads through modules and configurations."""
        if isinstance(node, ast.Name) and node.id not in self._locals:
            read = self._find_outside(node.id)
            return _MISSING if read is None else read()
        if not isinstance(node, ast.Attribute):
            return _MISSING
        if self._is_of_self(node):
            value = vars(self._owner).get(node.attr) if hasattr(self._owner, "__dict__") else None
            return value if is_configuration(value) else _MISSING
        holder = self._find(node.value)
        is_known = isinstance(holder, ModuleType) or is_configuration(holder)
        return getattr(holder, node.attr, _MISSING) if is_known else _MISSING


def _list_own_code(modules: Iterable[nn.Module]) -> Iterator[Callable[..., Any]]:
    """The user's own forward functions: one per class, and those set on single modules."""
    classes = {get_own_class(module): module for module in modules}
    for cls, module in classes.items():
        if not is_pure(cls):
            yield MethodType(cls.forward, module)
    for module in modules:
        if "forward" in vars(module):
            yield module.forward


def _is_pure_class(value: Any) -> bool:
    return isinstance(value, type) and (
        is_pure(value) or issubclass(value, BaseException) or only_holds_data(value)
    )


def _is_state(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _is_constant(value: Any) -> bool:
    items = value if isinstance(value, (tuple, frozenset)) else (value,)
    return all(isinstance(item, CONSTANTS) for item in items)


def _is_name(node: ast.AST, name: str | None) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _shorten(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _list_locals(tree: ast.AST) -> set[str]:
    """Names that a function defines: its parameters, and whatever it assigns."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) or (
            isinstance(node, ast.ExceptHandler) and node.name
        ):
            names.add(str(node.name))
    return names
