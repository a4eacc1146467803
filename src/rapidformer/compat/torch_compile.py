"""``torch.compile``: what was compiled, and why again; dynamo is imported only when needed."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch._compile import _disable_dynamo as untraced
from torch._guards import TracingContext
from torch.nn.attention import _cur_sdpa_kernel_backends

from rapidformer.compat.patches import quieten

__all__ = ["untraced"]

PRIVATE_NAMES = {
    "torch._compile._disable_dynamo": "functions that must run as they are",
    "torch._guards.TracingContext": "tensors that must not be traced",
    "torch._dynamo.exc.Unsupported": "the same",
    "torch._dynamo.utils.counters": "counting compiled graphs",
    "torch._dynamo.variables": "the name of a logger",
    "torch._dynamo.utils.calculate_time_spent": "the time spent on compiling",
    "torch._dynamo.utils.get_compilation_metrics": "why a block was compiled again",
    "torch.fx.experimental._config.use_duck_shape": "graphs for all sizes",
    "torch.fx.experimental._config.patch": "the same",
    "torch._dynamo.config.specialize_float": "the same",
    "torch._dynamo.config.patch": "the same",
    "torch._functorch.config.patch": "recomputing cheap activations",
    "torch._functorch.config.ban_recompute_materialized_backward": "the same",
    "torch._functorch.config.autograd_cache_allow_custom_autograd_functions": "cached code",
    "torch._functorch.config.enable_autograd_cache": "the same",
    "torch._functorch._aot_autograd.autograd_cache.check_node_safe": "the same",
    "torch._inductor.config.unsafe_marked_cacheable_functions": "the same",
    "torch._inductor.config.patch": "the same",
    "torch._inductor.config.triton.mix_order_reduction": "graphs for all sizes",
    "torch._inductor.async_compile.maybe_warm_pool": "processes that compile, started early",
    "torch._ops.OpOverload": "the same",
    "torch._ops.OpOverloadPacket": "the same",
    "torch._functorch.partitioners.min_cut_rematerialization_partition": "what a block keeps",
    "torch._inductor.decomposition.select_decomp_table": "the same",
    "torch._dynamo.lookup_backend": "wrapping a backend",
    "torch.nn.attention._cur_sdpa_kernel_backends": "compiled code for each choice of attention",
    "torch.amp.autocast_mode._enter_autocast": "regions of a graph that change autocast",
    "torch.amp.autocast_mode._exit_autocast": "the same",
    "torch._C._set_grad_enabled": "regions of a graph without gradients",
    "torch.autograd.grad_mode._enter_inference_mode": "the same",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "split and nested tensors",
}

_KNOWN_OPERATORS = {"aten", "prims", "_c10d_functional", "rapidformer"}
"""Namespaces of operators that only change with the version of torch or with our sources."""

_SAME_MEMORY = {
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "permute.default", "alias.default", "t.default",
        "transpose.int", "unsqueeze.default", "squeeze.dim", "squeeze.dims", "expand.default",
        "reshape.default", "detach.default",
    )
}  # fmt: skip
"""Operators whose result is their input in another shape."""

Backend = str | Callable[..., Any]
Rewrite = Callable[[Any], None]
"""Changes a traced graph in place."""


def start_workers() -> None:
    """Start the processes that compile kernels; until they are up, this one compiles them alone."""
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


def is_tracing() -> bool:
    """Whether this thread is tracing code for ``torch.compile``."""
    return TracingContext.try_get() is not None


def break_graph(reason: str) -> NoReturn:
    """Leave the code that is being traced uncompiled."""
    from torch._dynamo.exc import Unsupported

    raise Unsupported(reason)


def count_graphs() -> int:
    """Graphs compiled by this process so far, forward passes only."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def count_cached_graphs() -> int:
    """Graphs that this process has loaded from torch's cache so far, with their backward passes."""
    from torch._dynamo.utils import counters

    return int(counters["aot_autograd"]["autograd_cache_hit"])


def get_compile_seconds() -> float:
    """Seconds this process has spent on compiling, backward passes included."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent()["total_wall_time"])


def get_recompile_reason() -> str:
    """The guard whose failure caused the latest compilation, in torch's words."""
    from torch._dynamo.utils import get_compilation_metrics

    reasons = [metrics.recompile_reason for metrics in get_compilation_metrics()]
    latest = next((reason for reason in reversed(reasons) if reason), "torch gives no reason")
    return latest.splitlines()[0].split("  #")[0].strip()


@contextmanager
def compile_for_all_sizes() -> Iterator[None]:
    """Compile without assuming that sizes which are equal now always are. Floats are constants.

    Otherwise a first batch whose length happens to be the head size gets a graph for that length.
    And torch traces a graph with floats as its inputs, finds that the rate of a dropout has to be a
    constant, and starts again: what it traced first is never cached. Inductor fuses the two
    gradients of a norm only from some number of rows on, so it would compile again beyond that.
    """
    from torch._dynamo import config as dynamo_config
    from torch._inductor import config as inductor_config
    from torch.fx.experimental import _config

    has_fusion = hasattr(inductor_config.triton, "mix_order_reduction")
    with (
        _config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        dynamo_config.patch(specialize_float=True),
        inductor_config.patch({"triton.mix_order_reduction": False} if has_fusion else {}),
    ):
        yield


QUIET_TRACING = quieten("torch._dynamo.variables", "torch.fx.experimental.symbolic_shapes")
"""Inside, no warnings about single operations: a break in DeBERTa's graph alone prints 30 lines.
For the whole process: torch compiles a backward pass when it first runs, outside our calls."""


def get_example(node: Any) -> Any:
    """A tensor without values that stands for a node of a traced graph."""
    return node.meta["example_value"]


def find_example(node: Any) -> Any:
    """The same; None if there is none."""
    return node.meta.get("example_value")


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of others, as split (DTensor) and nested ones do."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(tensor))


def is_autocast_change(node: Any) -> int:
    """1 where a region of a graph that changes autocast begins, -1 where it ends, else 0."""
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

    return int(node.target is _enter_autocast) - int(node.target is _exit_autocast)


def is_gradient_change(node: Any) -> bool:
    """Whether gradients are turned on or off there, as by ``torch.no_grad()``."""
    from torch.autograd.grad_mode import _enter_inference_mode

    return node.target in (torch._C._set_grad_enabled, _enter_inference_mode)


def extend_backend(
    backend: Backend,
    rewrites: Sequence[Rewrite],
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[..., Any]:
    """The backend, on rewritten graphs (the last rewrite first), with more of torch's cache.

    It compiles inside the scope.

    Its backward passes recompute what takes no matrix product to compute. torch keeps the input of
    every matrix product that the backward pass repeats, although a normalization or an activation
    function gives it again in one pass over memory. In a Llama block these are a third of the
    activations.
    """

    def compile_graph(graph: Any, inputs: Any) -> Any:
        from torch._dynamo import lookup_backend
        from torch._functorch import config

        for rewrite in reversed(rewrites):
            rewrite(graph)
        is_lean = config.patch(ban_recompute_materialized_backward=False)
        with _cache_more_graphs(graph), _separate_cached_code(), is_lean, scope():
            return lookup_backend(backend)(graph, inputs)

    return compile_graph


def list_kept(
    join: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], *, weights: int
) -> list[tuple[int, ...]]:
    """What the compiled forward pass of a function keeps, without values and without compiling.

    ``join(primals, tangents)`` computes one output and gradients. Returns shape and bytes (last) of
    each tensor, but not of the first ``weights`` primals and not of copies of them in other types.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    # One mode for the whole trace: otherwise each result gets its own, with the stack of the call.
    trace = make_fx(join, decomposition_table=select_decomp_table(), tracing_mode="fake")
    graph = trace(primals, tangents)
    graph.graph.eliminate_dead_code()
    with config.patch(ban_recompute_materialized_backward=False):
        forward, _ = min_cut_rematerialization_partition(graph, (), num_fwd_outputs=1)
    nodes = list(forward.graph.nodes)
    own = set([node for node in nodes if node.op == "placeholder"][:weights])
    for node in nodes:  # a weight in another type or order
        inputs = node.all_input_nodes
        if node.op != "placeholder" and len(inputs) == 1 and inputs[0] in own:
            own.add(node)
    kept: dict[Any, tuple[int, ...]] = {}
    for node in nodes[-1].args[0][1:]:
        value = node.meta.get("val")
        if node not in own and isinstance(value, torch.Tensor):
            size = value.numel() * value.element_size()
            kept[_find_origin(node)] = (*value.shape, size)
    return list(kept.values())


def _find_origin(node: Any) -> Any:
    """The node whose memory this one shows in another shape."""
    while str(node.target) in _SAME_MEMORY:
        node = node.all_input_nodes[0]
    return node


def _separate_cached_code() -> Any:
    """Inside, separate files on disk for what torch's cache does not distinguish.

    A compiled graph holds the attention kernel that was chosen for it, so a run would get the
    kernel that an earlier run with another ``--attention`` chose. torch 2.11 does not distinguish
    bf16 from fp16 either. And all versions know our operators by name only, whatever they do.
    """
    from torch.compiler import config

    kernels = _cur_sdpa_kernel_backends(with_priority=True)
    names = [config.cache_key_tag, describe_sources(), *(kernel.name for kernel in kernels)]
    for kind in ("cpu", "cuda"):
        names += [str(torch.is_autocast_enabled(kind)), str(torch.get_autocast_dtype(kind))]
    return config.patch(cache_key_tag=" ".join(names))  # type: ignore[attr-defined]


@functools.cache
def describe_sources() -> str:
    """A digest of rapidformer's code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _cache_more_graphs(graph: Any) -> Iterator[None]:
    """Inside, graphs with autograd functions and regions of autocast are cached, too.

    torch can, but does not by default. Its check of a graph does not look into autograd functions.
    Graphs with other libraries' operators are not cached: torch knows operators by name only, and
    would use a backward pass that was traced before the user changed it.
    """
    from torch._functorch import config
    from torch._inductor import config as inductor_config

    # What these do depends on their arguments and on autocast, which are both in the key.
    names = [f"torch.amp.autocast_mode.{name}" for name in ("_enter_autocast", "_exit_autocast")]
    more = {**inductor_config.unsafe_marked_cacheable_functions, **dict.fromkeys(names, "")}
    with inductor_config.patch(unsafe_marked_cacheable_functions=more):
        with config.patch(autograd_cache_allow_custom_autograd_functions=True):
            is_allowed = _can_be_cached(graph)
        is_cached = config.enable_autograd_cache and _has_known_operators(graph)
        with config.patch(
            autograd_cache_allow_custom_autograd_functions=is_allowed,
            enable_autograd_cache=is_cached,
        ):
            yield


def _has_known_operators(graph: Any) -> bool:
    """Whether all operators of a graph and of those inside it are torch's or ours."""
    graphs = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    targets = (node.target for part in graphs for node in part.graph.nodes)
    kinds = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    names = (str(target) for target in targets if isinstance(target, kinds))
    return all(name.partition(".")[0] in _KNOWN_OPERATORS for name in names)


def _can_be_cached(graph: Any) -> bool:
    """Whether autograd functions have nothing inside but what torch's cache can tell apart."""
    bodies = [part for part in graph.children() if isinstance(part, torch.fx.GraphModule)]
    if not bodies:
        return True
    from torch._functorch._aot_autograd.autograd_cache import check_node_safe

    try:
        for node in (node for body in bodies for node in body.graph.nodes):
            check_node_safe(node)
    except Exception:  # torch treats whatever goes wrong there as a reason not to cache
        return False
    return all(map(_can_be_cached, bodies))


def copy_function(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function with its own code object: torch keeps compiled code with that object."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name)
