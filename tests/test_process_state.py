"""What belongs to the whole process is as it was: after an import, and after an engine's life.

Environment, signals, warning filters, loggers, torch's modes, flags and global hooks, its
compilers' settings, the registries of torch and transformers, and every function and class of other
libraries, with its code. Seeding is not meant: that is what ``--seed`` asks for.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from tests.processes import run_in_processes

pytestmark = pytest.mark.slow  # every function of torch is looked at

# What stays changed, with the reason.
ALLOWED = {
    "logger rapidformer": "it is ours, and shows messages as --log-level says",
}
DETERMINISTIC = {
    "environ CUBLAS_WORKSPACE_CONFIG": "cuBLAS reads it when it starts, which cannot be undone",
    "torch deterministic": "--deterministic promises equal results for whatever follows, too",
    "torch._inductor.config.deterministic": "the same, by torch",
}
DISTRIBUTED = {"exceptions": "torch's process groups show errors with the rank, from then on"}

# Tested where code is generated (tests/accel/test_compile.py) and with DeepSpeed.
BUILDERS = {"path": "setuptools, which builds the code, adds a folder of its own"}
COMPILED = {
    "environ _TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR": "torch's own, for its compiled code",
    **BUILDERS,
}

LIBRARIES = {
    "accelerate", "datasets", "huggingface_hub", "numpy", "peft", "safetensors", "tokenizers",
    "torch", "torchmetrics", "transformers",
}  # fmt: skip
"""Whose functions and classes are compared."""
SPEC = find_spec("rapidformer")
assert SPEC is not None and SPEC.origin is not None
OURS = str(Path(SPEC.origin).parent)
REGISTERED = {
    "rapidformer_by_row": "an attention and its masks, by a name that nobody else asks for",
    "rapidformer.models.gpt": "AutoConfig and AutoModel know GPTModel, by its own type",
}
"""What stays of ours in tables of other libraries, with the reason."""


def look() -> dict[str, Any]:
    """Every fact that others in the process may rely on."""
    facts: dict[str, Any] = {"warnings": [str(each) for each in warnings.filters]}
    facts |= {f"environ {name}": value for name, value in os.environ.items()}
    facts |= {f"signal {each.name}": signal.getsignal(each) for each in signal.Signals}
    facts["exceptions"] = (sys.excepthook, threading.excepthook, sys.unraisablehook)
    facts["path"] = (*sys.path, Path.cwd())
    facts["garbage"] = (gc.isenabled(), gc.get_threshold())
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    # One that nobody had asked for yet has no level of its own.
    loggers = [each for each in loggers if isinstance(each, logging.Logger) and each.level]
    return facts | {
        f"logger {each.name}": (each.level, each.propagate, *each.handlers, *each.filters)
        for each in loggers
    }


def look_at_torch() -> dict[str, Any]:
    import torch
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch.nn.attention import _cur_sdpa_kernel_backends
    from torch.nn.modules import module
    from torch.optim import optimizer

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    facts: dict[str, Any] = {
        "torch dtype": (torch.get_default_dtype(), torch.get_default_device()),
        "torch deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "torch tf32": (
            torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark, cudnn.enabled,
            cuda.matmul.allow_bf16_reduced_precision_reduction,
            cuda.matmul.allow_fp16_reduced_precision_reduction,
        ),
        "torch sdp": _cur_sdpa_kernel_backends(with_priority=True),
        "torch encoder": torch.backends.mha.get_fastpath_enabled(),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch modes": (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(),
            torch.is_autocast_cache_enabled(), torch._C._is_multithreading_enabled(),
            torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(),
            torch._C._autograd._top_saved_tensors_default_hooks(True),
            *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
            *(torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")),
        ),
    }  # fmt: skip
    for place in (module, optimizer):
        tables = {name: value for name, value in vars(place).items() if name.startswith("_global_")}
        facts |= {f"{place.__name__}.{name}": _copy(value) for name, value in tables.items()}
    configs: tuple[Any, ...] = (dynamo, functorch, inductor)
    for config in configs:
        values = config.get_config_copy().items()
        facts |= {f"{config.__name__}.{name}": value for name, value in values}
    return facts


def look_at_registries() -> dict[str, Any]:
    """What others look up by name: one that is new may be ours by its name, no other may change."""
    import torch
    from torch.utils import _pytree
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    named = {
        "attention": dict(ALL_ATTENTION_FUNCTIONS),
        "masks": dict(ALL_MASK_ATTENTION_FUNCTIONS),
        "experts": dict(ALL_EXPERTS_FUNCTIONS),
        "nested types": {str(kind): node for kind, node in _pytree.SUPPORTED_NODES.items()},
        "safe types": {str(kind): True for kind in torch.serialization.get_safe_globals()},
        "operators": dict.fromkeys(torch._C._dispatch_get_all_op_names(), True),
        **{
            f"{key} kernels": dict.fromkeys(
                torch._C._dispatch_get_registrations_for_dispatch_key(key), True
            )
            for key in ("CPU", "CUDA", "Meta", "AutogradCPU", "AutogradCUDA", "AutocastCPU",
                        "AutocastCUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
        },
    }  # fmt: skip
    return {
        f"{table}: {name}": value
        for table, entries in named.items()
        for name, value in entries.items()
        if "rapidformer" not in name
    }


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, dict) else value


# ---- functions and classes of other libraries ----------------------------------------------------
# Nothing is asked for an attribute: some objects import half a library, or warn, if they are.


def iterate_members() -> Iterator[tuple[str, Any]]:
    """What the libraries' modules and classes hold, as far as they are loaded."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES or not issubclass(type(module), ModuleType):
            continue
        for key, value in list(vars(module).items()):
            yield f"{name}.{key}", value
            if issubclass(type(value), type) and vars(value).get("__module__") == name:
                yield from ((f"{name}.{key}.{k}", member) for k, member in vars(value).items())


CALLED = {FunctionType, staticmethod, classmethod, property, functools.partial}
"""Types of what has code."""


def find_code(value: Any) -> CodeType | None:
    """The code of a function, also as a member of a class."""
    kind = type(value)
    if kind not in CALLED:
        return None
    if kind in (staticmethod, classmethod):
        value = value.__func__
    elif kind is property:
        value = value.fget
    elif kind is functools.partial:
        value = value.func
    return value.__code__ if type(value) is FunctionType else None


def look_at_code() -> dict[str, Any]:
    """Every function by name, with its code, and every class."""
    members: dict[str, Any] = {}
    for name, value in iterate_members():
        code = find_code(value)
        if code is not None or issubclass(type(value), type):
            members[name] = (value, code)
    return members


def list_changed_code(before: dict[str, Any]) -> list[str]:
    """Functions and classes that are others than before; what was not loaded yet is not known."""
    after = look_at_code()
    return [
        f"{name} is {after.get(name, ['gone'])[0]}, not {value}"
        for name, (value, code) in before.items()
        if name not in after or after[name][0] is not value or after[name][1] is not code
    ]


def find_ours() -> list[str]:
    """What of ours is in other libraries' modules and classes, or in tables that they hold."""
    found, seen = [], set()
    for name, value in iterate_members():
        found += [(name, value)] if is_ours(value) else []
        tables = [value] if issubclass(type(value), (dict, list, set)) else _list_tables(value)
        for table in tables:
            if id(table) not in seen:  # most are members of several modules
                seen.add(id(table))
                entries = _list_entries(table)
                found += [(f"{name}[{key}]", entry) for key, entry in entries if is_ours(entry)]
    places = [f"{place} is {each!r}" for place, each in found]
    return [each for each in places if not any(name in each for name in REGISTERED)]


def _list_tables(value: Any) -> list[Any]:
    """The tables of an object of the libraries, such as a registry."""
    if issubclass(type(value), (type, ModuleType)) or _get_library(type(value)) not in LIBRARIES:
        return []
    try:
        held: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return [each for each in held.values() if type(each) in (dict, list, set)]


def _list_entries(table: Any) -> list[tuple[Any, Any]]:
    if not isinstance(table, dict):
        return list(enumerate(table))
    # Not the table's own method: some import what they have on the way.
    entries = list(dict.items(table))
    return [*entries, *(("key", key) for key, _ in entries)]


def is_ours(value: Any) -> bool:
    kind = type(value)
    if kind in CALLED:
        members = (value.fget, value.fset) if kind is property else (value,)
        codes = [code for code in map(find_code, members) if code is not None]
        if codes:
            return any(code.co_filename.startswith(OURS) for code in codes)
    return _is_class_ours(value if issubclass(kind, type) else kind)


@functools.cache
def _is_class_ours(kind: type) -> bool:
    return _get_library(kind) == "rapidformer"


def _get_library(kind: type) -> str:
    return str(vars(kind).get("__module__", "")).partition(".")[0]


def list_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = [name for name in before | after if before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names]


def find_patches() -> list[str]:
    """What is still replaced in other libraries."""
    from rapidformer.compat.patches import Change, _places

    gc.disable()  # this process ends, and the next line makes each collection a second longer
    gc.unfreeze()  # what was there before this process forked is looked at, too
    kinds = {Change, *Change.__subclasses__()}
    assert not any(kind.__subclasses__() for kind in kinds - {Change}), "they would be left out"
    # Not isinstance, which asks the object: some are proxies of what is gone.
    changes = [each for each in gc.get_objects() if type(each) in kinds]
    assert changes
    left = [f"{change} is still made" for change in changes if change.is_made]
    return [
        *left,
        *(f"{place.name} is still replaced" for place in _places.values() if place.layers),
    ]


def train_each(cases: list[dict[str, Any]], folder: Path) -> tuple[list[list[str]], list[str]]:
    """What each case has changed, and what any of them has left replaced."""
    import transformers.processing_utils  # noqa: F401  (makes a second transformers of its own)

    import tests.accel.models  # noqa: F401

    if any(settings.get("compile") for settings in cases):
        _compile_once()
    before = look_at_code()
    changes = [train(settings, folder / str(n)) for n, settings in enumerate(cases)]
    return changes, [*list_changed_code(before), *find_ours(), *find_patches()]


def _compile_once() -> None:
    """In its first compilation, torch replaces some of its functions, and registers others."""
    import torch
    import torch._inductor.config

    with torch._inductor.config.patch(fallback_by_default=True):
        torch.compile(torch.neg)(torch.ones(1))


def train(settings: dict[str, Any], folder: Path) -> list[str]:
    """Compose, make two updates, save, export, close; returns what has changed.

    Compiled blocks call operators as they are: generating code for them would take much longer.
    """
    import torch._inductor.config

    from rapidformer import RapidformerEngine
    from tests.accel.models import get_loss, make

    before = look() | look_at_torch() | look_at_registries()
    engine = RapidformerEngine(args={"lr": 0.1, "device": "cpu", **settings})
    model, optimizer, *_ = engine.compose(model=make("gpt2"))
    with torch._inductor.config.patch(fallback_by_default=True):
        for _ in range(2):
            engine.backward(get_loss(model, "gpt2"))
            optimizer.step()
            optimizer.zero_grad()
    engine.save_checkpoint(folder / "saved")
    engine.export(folder / "exported")
    engine.close()
    return list_changes(before, look() | look_at_torch() | look_at_registries())


# Cases of a process follow each other: what one of them changes is listed as its own.
@pytest.mark.parametrize(
    ("cases", "ranks"),
    [
        (
            [
                {},
                {"bf16": True, "checkpoint_activations": True, "lora_rank": 2},
                {"fused_loss": "on", "dynamic_shape": "on", "activation_offload": True},
                {"attention": "eager"},
                {"deterministic": True},
            ],
            1,
        ),
        (
            [
                {"zero_3_memory_optimization": True},
                {"tensor_model_parallel_size": 2},
                {"context_parallel_size": 2},
            ],
            2,
        ),
        ([{"compile": True, "compile_backend": "inductor"}], 1),
    ],
    ids=["one process", "two processes", "compiled"],
)
def test_an_engine_leaves_the_process_as_it_was(
    cases: list[dict[str, Any]], ranks: int, tmp_path: Path
) -> None:
    for found, patches in run_in_processes(train_each, ranks, cases, tmp_path):
        assert not patches
        for settings, changes in zip(cases, found, strict=True):
            allowed = {*ALLOWED, *(DETERMINISTIC if "deterministic" in settings else ())}
            allowed |= {*DISTRIBUTED} if ranks > 1 else set()
            assert not [e for e in changes if not e.startswith(tuple(allowed))], settings


def train_task(folder: Path) -> tuple[list[str], list[str]]:
    """What a whole run has changed: loop, saves, evaluations, trackers, page."""
    import transformers.processing_utils  # noqa: F401
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    import rapidformer
    from tests.small import make_model_folder, make_pair_data

    model, data = make_model_folder(folder / "model"), make_pair_data(folder / "data")
    code = look_at_code()
    before = look() | look_at_torch() | look_at_registries()
    rapidformer.train(
        data, task="sequence_classification", pretrained_model_name_or_path=str(model), epochs=1,
        micro_batch_size=16, lr=1e-3, device="cpu", save=str(folder / "run"),
    )  # fmt: skip
    changes = list_changes(before, look() | look_at_torch() | look_at_registries())
    return changes, [*list_changed_code(code), *find_ours(), *find_patches()]


def test_a_run_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    ((changes, patches),) = run_in_processes(train_task, 1, tmp_path)
    assert not patches
    assert not [each for each in changes if not each.startswith(tuple(ALLOWED))]


def test_what_is_left_in_another_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.nn import functional
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from rapidformer.accel.unpad import places

    before, ours = look_at_code(), find_ours()
    monkeypatch.setattr(functional, "relu", places.gather)
    monkeypatch.setattr(torch.nn.Linear.forward, "__code__", _forward.__code__)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", places.gather)
    changed = [each.partition(" ")[0] for each in list_changed_code(before)]
    assert {"torch.nn.functional.relu", "torch.nn.modules.linear.Linear.forward"} <= {*changed}
    added = [each.partition(" ")[0] for each in find_ours() if each not in ours]
    registry = "transformers.modeling_utils.AttentionInterface._global_mapping[sdpa]"
    assert {"torch.nn.functional.relu", registry} <= {*added}


def _forward(self: Any, input: Any) -> Any:  # the names are torch's
    return input


def test_importing_changes_nothing() -> None:
    code = (
        "from tests.test_process_state import list_changes, look\n"
        "before = look()\n"
        "import rapidformer, rapidformer.config, rapidformer.cli.main\n"
        "changes = list_changes(before, look())\n"
        "assert not changes, changes\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
