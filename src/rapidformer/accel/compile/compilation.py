"""``torch.compile``, block by block.

Equal blocks share one compiled graph, so a deep model compiles as fast as a shallow one, and code
around the blocks (user code, losses, data-dependent branches) cannot break a graph. On a GPU,
normalizations outside the blocks that are written in Python are compiled as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from rapidformer.accel.assembly import Assembly
from rapidformer.accel.compile.compiled_blocks import CACHE, CompiledBlocks
from rapidformer.accel.compile.hashed_dropout import hash_dropout
from rapidformer.accel.compile.merged_linears import merge_linears
from rapidformer.compat.patches import Change
from rapidformer.compat.torch_compile import QUIET_TRACING, Backend, Rewrite, start_workers
from rapidformer.compat.torch_modules import list_hooks
from rapidformer.config import Settings
from rapidformer.config.row import AUTO
from rapidformer.config.sections import AccelerationArguments
from rapidformer.config.switches import get_switch
from rapidformer.errors import ConfigurationError
from rapidformer.log import warn_once
from rapidformer.models.plan import ModelPlan
from rapidformer.models.watched import list_inner_modules
from rapidformer.overlay import put_fact

_MOST_BYTES = 10 * 2**30
"""How much compiled code is kept."""
_DAY = 24 * 3600.0
_LARGEST_FRACTION = 0.01
"""16-bit copies of the weights may take this fraction of the GPU's memory."""


def prepare(args: Settings, device: torch.device) -> None:
    """Start what takes seconds, before a model is built: torch would do it in the first step."""
    is_inductor = _choose_backend(args) == "inductor"
    if get_switch("compilation").is_on(args) and is_inductor and device.type == "cuda":
        start_workers()


def apply(assembly: Assembly) -> str:
    """Compile the blocks of this rank."""
    args, plan, model = assembly.args, assembly.plan, assembly.model
    backend = _choose_backend(args)
    if backend == "inductor":
        assembly.applied.enter(KEPT_CODE)
    if not os.environ.get("TORCH_LOGS"):
        assembly.applied.enter(QUIET_TRACING)
    norms = find_outer_norms(model, plan) if assembly.device.type == "cuda" else []
    apply_compile(model, plan, backend=backend, rewrites=_choose_rewrites(assembly), norms=norms)
    count = len(plan.blocks)
    what = f"{count} block{'s' * (count != 1)}" if count else "the whole model"
    if norms:
        what += f" and {len(norms)} norm{'s' * (len(norms) != 1)} outside them"
    line = f"torch.compile of {what} with {backend}"
    if args.onnx_runtime_training:
        line += " (--onnx-runtime-training: ONNX Runtime's training package has been discontinued)"
    return line


def _choose_backend(args: AccelerationArguments) -> str:
    """Of what is compiled: the row of ``--compile`` says where ``auto`` compiles nothing."""
    return "inductor" if args.compile_backend == AUTO else args.compile_backend


def apply_compile(
    model: nn.Module,
    plan: ModelPlan,
    *,
    backend: Backend = "inductor",
    rewrites: Sequence[Rewrite] = (),
    norms: Iterable[nn.Module] = (),
) -> nn.Module:
    """Compile each block in place, or the whole model if it has no blocks."""
    known = torch.compiler.list_backends(exclude_tags=())
    if isinstance(backend, str) and backend not in known:
        # torch would say so at the first step, with a long traceback.
        raise ConfigurationError(
            f"--compile-backend {backend}: torch has no such backend. It has {', '.join(known)}."
        )
    compiled = CompiledBlocks(backend, rewrites=rewrites)
    put_fact(model, compiled)
    if not plan.blocks:
        warn_once(
            f"--compile: no repeated blocks were found in {type(model).__name__}, "
            "so the whole model is compiled."
        )
    for block in plan.get_blocks(model) if plan.blocks else [model]:
        compiled.add(block)
    for norm in norms:
        compiled.add(norm, only_with_gradients=True)
    return model


def find_outer_norms(model: nn.Module, plan: ModelPlan) -> list[nn.Module]:
    """Norms in Python outside the blocks (Llama's last): uncompiled, many passes over memory."""
    inside = set(list_inner_modules(model, plan.blocks).values())
    outside = [module for module in model.modules() if module not in inside]
    return list(filter(_is_python_norm, outside)) if plan.blocks else []


def _is_python_norm(module: nn.Module) -> bool:
    """Whether a module is a norm written in Python: vectors as parameters, and a norm's name."""
    parameters = list(module.parameters(recurse=False))
    author = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    return (
        any("norm" in cls.__name__.lower() for cls in type(module).__mro__)
        and bool(parameters)
        # A subclass of nn.Parameter is a weight that is split over ranks, or absent.
        and all(type(each) is nn.Parameter and each.dim() == 1 for each in parameters)
        and not [*module.buffers(recurse=False), *module.children(), *list_hooks(module)]
        and not author.__module__.startswith("torch.")
    )


def _choose_rewrites(assembly: Assembly) -> list[Rewrite]:
    """The rewrites that make this model's graphs faster on this device: rows of their own."""
    rewrites: list[Rewrite] = []
    # On a CPU, products with fp32 results are slow, and hashed dropout has not been timed.
    if assembly.wants("merged linear layers"):
        copies = sum(2 * parameter.numel() for parameter in assembly.model.parameters())
        memory = torch.cuda.get_device_properties(assembly.device).total_memory
        if copies < _LARGEST_FRACTION * memory:
            rewrites.append(merge_linears)
            assembly.applied.add_part("merged linear layers")
    if assembly.wants("hashed dropout") and _choose_backend(assembly.args) == "inductor":
        rewrites.append(hash_dropout)  # many operations, which inductor fuses
        assembly.applied.add_part("hashed dropout")
    return rewrites


def _keep_compiled_code() -> Callable[[], None]:
    folder = _find_folder()
    if folder is None:
        return lambda: None
    os.environ[CACHE] = folder

    def restore() -> None:
        if os.environ.get(CACHE) == folder:
            del os.environ[CACHE]
        limit_size(Path(folder))

    return restore


def limit_size(folder: Path, most: int = _MOST_BYTES, least_age: float = _DAY) -> None:
    """Remove the files that were not used for longest, but none of the last day."""
    files = []
    # Not rglob(), which fails if another run removes a folder meanwhile.
    for path in (Path(place, name) for place, _, names in os.walk(folder) for name in names):
        with suppress(OSError):
            facts = path.stat()
            files.append((max(facts.st_atime, facts.st_mtime), facts.st_size, path))
    excess = sum(size for _, size, _ in files) - most
    newest = time.time() - least_age
    for used, size, path in sorted(files, key=lambda file: file[0]):
        if excess <= 0 or used > newest:
            return
        with suppress(OSError):
            path.unlink()
        excess -= size


KEPT_CODE = Change(_keep_compiled_code)
"""Inside, later runs can reuse compiled kernels: torch keeps them in /tmp, which is often cleared.

For the whole process: torch reads the variable wherever it compiles, in processes of its own too.
"""


def _find_folder() -> str | None:
    """Where to keep them; None leaves the user's choice, or torch's if there is no home."""
    if os.environ.get(CACHE):
        return None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(base).expanduser().absolute() / "rapidformer" / "torchinductor"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    return str(folder) if os.access(folder, os.W_OK) else None
