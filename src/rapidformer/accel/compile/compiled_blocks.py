"""Which compiled function runs a call of a block, so that each is compiled exactly once.

Left to itself, torch keeps all versions of all blocks in one list: it compiles for the first
length, again for the second, again for a batch of one row or without padding, again for
evaluation, and after 8 versions it silently runs everything else uncompiled. Here every form of
call has its own function: the first sizes seen are compiled as they are, all others share one
function that takes any size. What torch compiles beyond that is a recompilation, and is reported.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rapidformer.accel.attention.kernel_scope import choose_for_all_sizes, use_kernels
from rapidformer.accel.context.arguments import is_cache
from rapidformer.accel.cuda_graph.block_calls import without_cast_cache
from rapidformer.accel.cuda_graph.host_constants import without_host_constants
from rapidformer.accel.unpad.masks import RowMask
from rapidformer.compat import torch_compile
from rapidformer.compat.peft import are_adapters_off
from rapidformer.compat.torch_compile import Backend, Rewrite
from rapidformer.compat.torch_modules import call_plainly, set_compiled_call
from rapidformer.log import say_once, warn_once
from rapidformer.models.watched import Watching
from rapidformer.overlay import get_own_class

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""The variable that tells torch where to keep compiled code."""
_NOT_COMPILED = "the model passes its blocks a key/value cache or nested tensors in every call"
_HOOKS = "the blocks have hooks"
_NOT_CALLED = "torch found nothing to compile in the blocks, or the model does not call them"


@dataclass
class _Compiled:
    """One compiled function, and the blocks it has run."""

    run: Callable[..., Any]
    takes_all_sizes: bool
    seen: set[int] = field(default_factory=set)


class CompiledBlocks:
    """The compiled functions of a model, and a count of what was compiled."""

    def __init__(self, backend: Backend, *, rewrites: Sequence[Rewrite] = ()) -> None:
        """``rewrites`` change a graph in place before it is compiled."""
        self.graphs = self.recompilations = self.from_cache = 0
        self._skips_calls = self._has_hooks = False
        self._backend, self._rewrites = backend, rewrites
        self._kinds: dict[Hashable, int] = {}
        self._members: Counter[int] = Counter()
        """How many blocks there are of each kind."""
        self._sizes_vary = False
        self._first_sizes: dict[Hashable, tuple[torch.Size, ...] | None] = {}
        self._functions: dict[Hashable, _Compiled] = {}
        self._started_at = torch_compile.get_compile_seconds()

    def __reduce__(self) -> tuple[Any, ...]:
        # torch leaves compiled calls out of a model's copy or pickle, so it has compiled nothing.
        return functools.partial(CompiledBlocks, rewrites=self._rewrites), (self._backend,)

    def add(self, block: nn.Module, *, only_with_gradients: bool = False) -> None:
        """Compile this block when it is called."""
        kind = self._kinds.setdefault(_describe_kind(block), len(self._kinds))
        self._members[kind] += 1
        watching = Watching(dict(block.named_modules()))
        call = functools.partial(self._call, block, kind, watching, only_with_gradients)
        set_compiled_call(block, call)

    def expect_other_sizes(self) -> None:
        """Compile for all sizes from the start, and not for the first one alone before."""
        self._sizes_vary = True

    def describe(self) -> str:
        """What was compiled so far, or why nothing was."""
        if not self.graphs:
            skipped = _HOOKS if self._has_hooks else _NOT_COMPILED if self._skips_calls else ""
            return f"nothing: {skipped or _NOT_CALLED}"
        graphs = f"{self.graphs} graph{'s' * (self.graphs != 1)}"
        again = f"{self.recompilations} recompilation{'s' * (self.recompilations != 1)}"
        cached = f" ({self.from_cache} from the cache)" if self.from_cache else ""
        seconds = torch_compile.get_compile_seconds() - self._started_at
        return f"{graphs} in {seconds:.1f} s{cached}, {again}"

    def _call(
        self, block: nn.Module, kind: int, watching: Watching, only_with_gradients: bool, /,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        # Generation would compile it for prompts and again for single tokens.
        if only_with_gradients and not torch.is_grad_enabled():
            return call_plainly(block, *args, **kwargs)
        # torch does not look whether the hooks of a block are those that it has compiled.
        if watching.find_watched():
            self._say_hooks(block)
            return call_plainly(block, *args, **kwargs)
        form: list[Any] = [kind, block.training, torch.is_grad_enabled(), are_adapters_off()]
        sizes: list[torch.Size] = []
        if not _describe((*args, *kwargs.values()), form, sizes):
            self._skips_calls = True
            return call_plainly(block, *args, **kwargs)
        compiled = self._choose(block, (*form, *kwargs), tuple(sizes))
        if not compiled.seen and torch.is_grad_enabled():
            _announce(block, self._members[kind])
        # Here as well, and not in the compiled code: a recomputed block is not in its model's call.
        with use_kernels(block):
            if id(block) in compiled.seen or not compiled.takes_all_sizes:
                return self._run(compiled, block, args, kwargs)
            # This call may compile for all sizes, which needs a few settings of torch.
            with torch_compile.compile_for_all_sizes():
                return self._run(compiled, block, args, kwargs)

    def _say_hooks(self, block: nn.Module) -> None:
        self._has_hooks = True
        warn_once(
            f"--compile: a {get_own_class(block).__name__} with hooks runs uncompiled, so that its "
            "hooks run, and in no other block (one that changes nothing may say so: "
            "hook.only_looks = True)."
        )

    def _choose(self, block: nn.Module, form: Hashable, sizes: tuple[torch.Size, ...]) -> _Compiled:
        """The function for calls of this form and these sizes."""
        # An evaluation ends with a smaller batch: one graph for all sizes from the start.
        takes_all = not torch.is_grad_enabled()
        if not takes_all:
            first = self._first_sizes.setdefault(form, None if self._sizes_vary else sizes)
            takes_all = first != sizes
            self._sizes_vary |= takes_all
        # torch compiles sizes of 0 and 1 separately, since such a dimension may broadcast.
        fixed = tuple(tuple(each if each in (0, 1) else None for each in size) for size in sizes)
        key = (form, fixed if takes_all else None)
        if key not in self._functions:
            name = f"block_{len(self._functions)}"
            function = torch_compile.copy_function(_run, name)
            # Whenever torch compiles it: also if it does so again.
            scope = functools.partial(choose_for_all_sizes, block) if takes_all else nullcontext
            backend = torch_compile.extend_backend(self._backend, self._rewrites, scope)
            run = torch.compile(function, backend=backend, dynamic=takes_all)
            self._functions[key] = _Compiled(run=run, takes_all_sizes=takes_all)
        return self._functions[key]

    def _run(
        self, compiled: _Compiled, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a compiled function, and count what torch compiles for it."""
        before, cached_before = torch_compile.count_graphs(), torch_compile.count_cached_graphs()
        # It casts weights itself. Torch would recompile it wherever autocast's cache is off.
        with without_host_constants(), without_cast_cache():
            output = compiled.run(block, *args, **kwargs)
        new = torch_compile.count_graphs() - before
        self.from_cache += torch_compile.count_cached_graphs() - cached_before
        self.graphs += new
        if new and id(block) in compiled.seen:
            self.recompilations += new
            warn_once(
                f"--compile: {type(block).__name__} was compiled again, which stalls the step: "
                f"{torch_compile.get_recompile_reason()}",
                is_local=True,
            )
        compiled.seen.add(id(block))
        return output


def _announce(block: nn.Module, count: int) -> None:
    """Say why nothing seems to happen."""
    folder = os.environ.get(CACHE)
    kept = f"; kept for later runs in {folder}" if folder else ""
    others = f", for {count} of its kind" if count > 1 else ""
    say_once(f"compiling {get_own_class(block).__name__}{others}{kept}")


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Not block.compile(): torch skips frames of torch.nn, so a block that is one of torch's own
    # layers would silently stay uncompiled. This frame is ours.
    return call_plainly(module, *args, **kwargs)


def _describe_kind(block: nn.Module) -> Hashable:
    """Equal for blocks that can share a graph. Any other difference is left to torch."""
    parameters = [(n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters()]
    classes = [type(module) for module in block.modules()]
    # Floats become constants of a graph, and torch stops compiling a function after 8 graphs.
    # Integers are left out: every block has its index, which hardly ever matters.
    constants = [
        (name, value)
        for module in block.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
    ]
    return (*parameters, *classes, *constants)


def _describe(values: Iterable[Any], form: list[Any], sizes: list[torch.Size]) -> bool:
    """Add to ``form`` and ``sizes`` what decides which function runs; False for no compiled one.

    A call that fills a key/value cache is not compiled: the cache has another length at each call,
    and each block another place in it. Nor is a call with a nested tensor, which torch cannot
    compile: in evaluation, nn.TransformerEncoder builds one from a padded batch.
    """
    for value in values:
        if isinstance(value, Tensor):
            if value.is_nested:
                return False
            # An expanded tensor, such as a mask without padding, needs its own address arithmetic.
            form += [value.dtype, tuple(step == 0 for step in value.stride())]
            sizes.append(value.shape)
        elif isinstance(value, RowMask) and value.fused is not None:
            form += [RowMask, value.fused.are_short]
            sizes.append(value.fused.sizes)
        elif value is None or isinstance(value, bool):
            form.append(value)
        elif isinstance(value, (tuple, list)):
            form.append(len(value))
            if not _describe(value, form, sizes):
                return False
        else:
            form.append(type(value))
            if is_cache(value):
                return False
    return True
