"""Find side effects in a forward step: Python code that a replayed graph would leave out.

A graph repeats what the device did, not the code that launched it. So a step may compute with its
arguments, constants, modules and torch's functions, but whatever else it calls or changes, such as
a counter, a log or a queue, would silently stop working. This file reads the source of a step and
looks up every name in it; what it cannot judge counts as a side effect.

Numbers and tensors that the code reads from outside, such as ``self.weight``, are allowed. They may
change later, so a graph is valid only for the values it was recorded with.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import textwrap
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from rapidformer.config import Settings
from rapidformer.overlay import get_own_class

_LIBRARIES = ("torch", "transformers", "rapidformer", "peft", "accelerate", "math", "typing")
_SIDE_EFFECTS = {"print", "input", "open", "setattr", "delattr", "exec", "eval", "globals"}
_CONSTANTS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)


class Examination:
    """What was found in the code of forward steps, and of the user's own modules.

    The ``_check_*`` methods return the first side effect they find, like ``uses print``, or None.
    """

    def __init__(self, steps: Iterable[Callable[..., Any]], model: nn.Module) -> None:
        self._seen: set[Any] = set()
        self._values: list[Callable[[], Any]] = []
        self._attributes: list[Callable[[], Any]] = []
        self._instances: dict[type, list[nn.Module]] = defaultdict(list)
        self._own_parameters = {id(parameter) for parameter in model.parameters()}
        self.modules: dict[nn.Module, None] = {}
        """Those of the model, and others that the code calls, such as a criterion."""
        effects = itertools.chain(
            [self._add(model, self._check_with_name)], map(self._check_with_name, steps)
        )
        self.effect = self._first(effects)
        """What the code does besides computing, such as ``step uses print``; None if nothing."""

    def read_values(self) -> Hashable:
        """The current values of what the code reads from outside: a graph is valid for these."""
        values = tuple(
            (value.data_ptr(), value.shape) if isinstance(value, torch.Tensor) else value
            for value in (read() for read in self._values)
        )
        return values, tuple(read() for read in self._attributes)

    def list_tensors(self) -> list[torch.Tensor]:
        """Tensors that the code may change in place: buffers, and those it reads from outside."""
        buffers = (buffer for module in self.modules for buffer in module.buffers(recurse=False))
        outside = (value for value in (read() for read in self._values) if _is_state(value))
        return list({id(tensor): tensor for tensor in (*buffers, *outside)}.values())

    def _add(self, root: nn.Module, check: Callable[[Any], str | None]) -> str | None:
        """Check a module and those inside it, unless that was done before."""
        new = [module for module in root.modules() if module not in self.modules]
        self.modules |= dict.fromkeys(new)
        if any(id(p) not in self._own_parameters and p.requires_grad for p in root.parameters()):
            return f"uses a {type(root).__name__} with trainable weights outside the model"
        for module in new:
            self._instances[get_own_class(module)].append(module)
            names = _list_attributes(module)
            self._attributes += [functools.partial(vars(module).get, name) for name in names]
        return self._first(map(check, _list_own_code(new)))

    def _check_with_name(self, function: Any) -> str | None:
        """The same as ``_check_function``, with the function's name in front."""
        effect = self._check_function(function)
        name = getattr(function, "__qualname__", type(function).__name__)
        return None if effect is None else f"{name} {effect}"

    def _check_function(self, function: Any) -> str | None:
        """Check a function's source. That of libraries is trusted."""
        if isinstance(function, functools.partial):
            values = [*function.args, *function.keywords.values()]
            return self._check_function(function.func) or self._first(
                self._check_value(functools.partial(_return, value), "an argument")
                for value in values
            )
        owner = function.__self__ if isinstance(function, MethodType) else None
        function = inspect.unwrap(getattr(function, "__func__", function))
        if _is_from_library(function) or isinstance(function, BuiltinFunctionType):
            return None
        if not isinstance(function, FunctionType):
            return f"calls a {type(function).__name__}"
        if function in self._seen:
            return None
        self._seen.add(function)
        tree = _parse(function)
        if tree is None:
            return "has no source code to check"
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(isinstance(value, (list, dict, set)) for value in defaults):
            return "has a default argument that may change"
        return self._first(self._check_node(node, function, owner, tree) for node in ast.walk(tree))

    def _first(self, effects: Iterable[str | None]) -> str | None:
        return next((effect for effect in effects if effect is not None), None)

    def _check_node(
        self, node: ast.AST, function: FunctionType, owner: Any, tree: ast.AST
    ) -> str | None:
        """Check one node of a function's syntax tree; ``owner`` is a method's ``self``."""
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            return f"changes {node.names[0]}"
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
            return "is not an ordinary function"
        if isinstance(node, ast.Attribute):
            if not isinstance(node.ctx, ast.Load):
                return f"changes {ast.unparse(node)}"
            if owner is not None and _is_name(node.value, _get_first_parameter(function)):
                return self._check_attribute(owner, node.attr)
            if isinstance(node.value, ast.Call) and _is_name(node.value.func, "super"):
                found = [vars(cls).get(node.attr) for cls in type(owner).__mro__]
                methods = [MethodType(each, owner) for each in found if callable(each)]
                return self._first(self._check_function(method) for method in methods)
            return self._check_method(node.attr)
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            root = node.value
            is_local = isinstance(root, ast.Name) and root.id in _list_locals(tree)
            return None if is_local else f"changes {ast.unparse(node)}"
        if not isinstance(node, ast.Name) or node.id in _list_locals(tree):
            return None
        return self._check_name(node.id, function)

    def _check_name(self, name: str, function: FunctionType) -> str | None:
        """Check a name that a function does not define: from its closure, a global or a builtin."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        if name in cells:
            if name == "__class__":
                return None
            return self._check_value(lambda: cells[name].cell_contents, name)
        if name in function.__globals__:
            return self._check_value(lambda: function.__globals__[name], name)
        if name in _SIDE_EFFECTS or not hasattr(builtins, name):
            return f"uses {name}"
        return None

    def _check_method(self, name: str) -> str | None:
        """Check ``x.name`` for an unknown ``x``: in all of the user's modules that have it."""
        owners = [
            instances[-1]
            for cls, instances in self._instances.items()
            if not _is_from_library(cls)
            and isinstance(inspect.getattr_static(cls, name, None), (FunctionType, property))
        ]
        return self._first(self._check_attribute(owner, name) for owner in owners)

    def _check_attribute(self, owner: Any, name: str) -> str | None:
        """Check ``self.name``: a method or property is read, and a value is noted."""
        found = inspect.getattr_static(owner, name, None)
        if isinstance(found, property):
            return self._check_function(found.fget) if found.fget is not None else None
        if isinstance(found, functools.cached_property):
            return self._check_function(found.func)
        if isinstance(found, FunctionType):
            return self._check_function(MethodType(found, owner))
        # The code is the same for all instances of a class, but each may have another value.
        owners = self._instances.get(get_own_class(owner), [owner])
        return self._first(
            self._check_value(functools.partial(getattr, each, name, None), f"self.{name}")
            for each in owners
        )

    def _check_value(self, read: Callable[[], Any], name: str) -> str | None:
        """Check what a function reads from outside, and note it if its value may change."""
        value = read()
        if isinstance(value, nn.Module):
            return self._add(value, self._check_function)
        if isinstance(value, Settings):
            return None
        if isinstance(value, torch.Tensor) and value.requires_grad:
            is_known = id(value) in self._own_parameters
            return None if is_known else f"uses {name}, a trainable weight outside the model"
        if isinstance(value, (*_CONSTANTS, torch.Tensor)) or _is_plain_tuple(value):
            self._values.append(read)
            return None
        if isinstance(value, ModuleType):
            is_known = value.__name__.partition(".")[0] in _LIBRARIES
            return None if is_known else f"uses {name}"
        if isinstance(value, type):
            is_known = _is_from_library(value) or value.__module__ == "builtins"
            return None if is_known else f"uses {name}"
        if isinstance(value, (FunctionType, MethodType, functools.partial, BuiltinFunctionType)):
            return self._check_function(value)
        return f"uses {name}"


def _is_from_library(thing: Any) -> bool:
    module = getattr(thing, "__module__", None) or ""
    return str(module).partition(".")[0] in _LIBRARIES


def _list_attributes(module: nn.Module) -> list[str]:
    """Names of numbers that code may read or change: ``model.alpha``, ``attention.scaling``."""
    cls = get_own_class(module)
    if cls.__module__.partition(".")[0] == "torch":
        return []
    kinds = (bool, float) if _is_from_library(cls) else _CONSTANTS
    found = vars(module).items()
    return [name for name, value in found if isinstance(value, kinds) and name != "training"]


def _list_own_code(modules: Iterable[nn.Module]) -> Iterator[Callable[..., Any]]:
    """The user's own forward functions: one per class, and those set on single modules."""
    classes = {get_own_class(module): module for module in modules}
    for cls, module in classes.items():
        if not _is_from_library(cls):
            yield MethodType(cls.forward, module)
    for module in modules:
        if "forward" in vars(module):
            yield module.forward


def _is_state(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _return(value: Any) -> Any:
    return value


def _is_plain_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, _CONSTANTS) for item in value)


def _is_name(node: ast.AST, name: str | None) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _parse(function: FunctionType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return None


def _get_first_parameter(function: FunctionType) -> str | None:
    names = function.__code__.co_varnames
    return names[0] if function.__code__.co_argcount else None


def _list_locals(tree: ast.AST) -> set[str]:
    """Names that a function defines: its parameters, and whatever it assigns."""
    stored = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    defined = {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    return stored | parameters | defined
