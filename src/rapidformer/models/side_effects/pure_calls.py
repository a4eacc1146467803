"""Calls that a replay may leave out: they compute, and do nothing else. All others may do more.

Rows are modules, classes or functions by their full name; a row covers all that is inside it. Code
of the user's own, and ours where no row covers it, is read instead (``examination.py``).
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import functools
import reprlib
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PURE = {
    "collections", "cmath", "functools", "itertools", "math", "numbers", "operator", "typing",
    "torch.amp.autocast_mode", "torch.autograd.grad_mode", "torch.functional",
    "torch.nn.functional", "torch.nn.modules", "torch.nn.utils.parametrizations",
    "torch.nn.utils.parametrize", "torch.nn.utils.rnn", "torch.nn.utils.weight_norm",
    "transformers.activations", "transformers.cache_utils", "transformers.integrations",
    "transformers.loss", "transformers.masking_utils", "transformers.modeling_layers",
    "transformers.modeling_outputs", "transformers.modeling_rope_utils",
    "transformers.modeling_utils", "transformers.models", "transformers.pytorch_utils",
    "transformers.tokenization_utils_base.BatchEncoding", "transformers.utils.generic.ModelOutput",
    "peft.mixed_model", "peft.peft_model", "peft.tuners", "peft.utils.other",
    "rapidformer.accel", "rapidformer.context.get_args", "rapidformer.context.get_tokenizer",
    "rapidformer.data.pretraining", "rapidformer.dist.mpu", "rapidformer.dist.vocabulary",
    "rapidformer.models", "rapidformer.objectives", "rapidformer.tasks",
}  # fmt: skip
PURE_BUILTINS = {
    "abs", "all", "any", "bool", "bytes", "callable", "complex", "dict", "divmod", "enumerate",
    "filter", "float", "format", "frozenset", "getattr", "hasattr", "hash", "int", "isinstance",
    "issubclass", "iter", "len", "list", "map", "max", "min", "next", "object", "pow", "range",
    "repr", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super", "tuple", "type",
    "zip",
    *(n for n, v in vars(builtins).items() if isinstance(v, type) and issubclass(v, BaseException)),
}  # fmt: skip
_CONSTRUCTORS = {
    "Size", "Tensor", "arange", "as_tensor", "empty", "eye", "finfo", "full", "iinfo", "is_tensor",
    "linspace", "logspace", "ones", "promote_types", "rand_like", "randint_like", "randn_like",
    "result_type", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
DRAWS = {getattr(torch, name) for name in ("normal", "rand", "randint", "randn", "randperm")}
"""On the host, unless told a device: a replay repeats what the device has drawn, but not this."""

WAITS = {"cpu", "item", "numpy", "tolist"}
"""Methods of tensors that wait for the device, which a recording cannot."""
_STATEFUL = {
    "backward", "pin_memory", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    "share_memory_",
}  # fmt: skip
_OF_MODULES = {
    "buffers", "children", "forward", "get_base_model", "get_buffer", "get_decoder", "get_encoder",
    "get_input_embeddings", "get_output_embeddings", "get_parameter", "get_submodule", "modules",
    "named_buffers", "named_children", "named_modules", "named_parameters", "parameters",
    "to_tuple",
}  # fmt: skip
PURE_METHODS = {
    *_OF_MODULES,
    *(
        name
        for kind in (Tensor, dict, list, tuple, str, set, int, float)
        for name in dir(kind)
        if not name.startswith("_")
    ),
} - WAITS - _STATEFUL  # fmt: skip
"""Of tensors, modules and containers, which are what a step holds."""

MUTATORS = {
    "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault",
    "update",
}  # fmt: skip
"""Methods that change a container: of what a step has made itself, they are part of it."""


@functools.cache
def _list_torch_functions() -> frozenset[Any]:
    """torch's operators, and what makes tensors."""
    operators = torch.overrides.get_overridable_functions()
    places: list[Any] = [torch, functional, torch.linalg, torch.fft, torch.special]
    made = (getattr(torch, name) for name in _CONSTRUCTORS)
    return frozenset([*(each for place in places for each in operators[place]), *made, *DRAWS])


def trust(*names: str) -> None:
    """List functions, classes or modules that stand above this layer."""
    PURE.update(names)


def is_pure(thing: Any) -> bool:
    """Whether a function or class is listed."""
    parts = get_full_name(thing).split(".")
    prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return not PURE.isdisjoint(prefixes) or thing in _list_torch_functions()


def is_from_library(thing: Any) -> bool:
    """Whether its code is not read: another project's, or a builtin."""
    is_python = isinstance(thing, (FunctionType, type))
    root = get_full_name(thing).partition(".")[0]
    return not is_python or root in {"torch", "transformers", "peft", "accelerate", "numpy"}


_GENERATED = {"<string>", *(module.__file__ for module in (collections, dataclasses, reprlib))}
"""Files of the functions that dataclasses and named tuples are given."""


def only_holds_data(cls: type) -> bool:
    """Whether a class is a dataclass or a named tuple without any code of its own."""
    own = [base for base in cls.__mro__ if base.__module__ != "builtins" and not is_pure(base)]
    made = (
        [field.default_factory for field in dataclasses.fields(cls)]
        if dataclasses.is_dataclass(cls)
        else []
    )
    return (
        (dataclasses.is_dataclass(cls) or issubclass(cls, tuple))
        and type(cls).__call__ is type.__call__
        and all(_has_no_code(member) for base in own for member in vars(base).values())
        and all(each in (dataclasses.MISSING, dict, list, set, tuple) for each in made)
    )


def _has_no_code(member: Any) -> bool:
    function = getattr(member, "__func__", member)  # of a classmethod
    if isinstance(function, FunctionType):
        return function.__code__.co_filename in _GENERATED
    return not isinstance(member, (property, functools.cached_property))


def get_full_name(thing: Any) -> str:
    """As ``torch.nn.functional.relu``; of a decorated function, the decorator's own."""
    module = getattr(thing, "__module__", None) or ""
    if isinstance(thing, FunctionType):
        module = thing.__globals__.get("__name__", module)
    return f"{module}.{getattr(thing, '__qualname__', type(thing).__name__)}"
