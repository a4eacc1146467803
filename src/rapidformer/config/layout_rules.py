"""The rules between switches, and between switches and the ranks of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec

from rapidformer.config.settings import Settings
from rapidformer.config.switches import SWITCHES, Rule, Switch, to_flag
from rapidformer.errors import MissingPackageError

# Ranks along these axes work on the same samples.
AXES_OF_A_SAMPLE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
)  # fmt: skip

# 8-bit moments have a scale for each block of 256 values.
_SPLIT_MOMENTS = ("tensor parallelism", "expert parallelism", "ZeRO", "CPU offload")


def find_layout_problems(args: Settings) -> Iterator[str]:
    """Switches that do not combine, and sizes that do not divide the ranks."""
    yield from _check_switches(args)
    yield from _check_fp8(args)
    yield from _check_optimizer_state(args)
    yield from _check_ranks(args)


def _check_switches(args: Settings) -> Iterator[str]:
    """Contradictions, exclusions and requirements, as the switches' rows state them."""
    for switch in SWITCHES:
        contradiction = switch.find_contradiction(args)
        if contradiction:
            yield f"{' and '.join(contradiction)} exclude each other: give only one of them."
        if not switch.is_on(args):
            continue
        for rule in switch.excludes:
            if rule.holds(args):
                yield _describe_exclusion(switch, rule, args)
        if switch.is_refused_alone and not switch.has_what_it_needs(args):
            needed = " or ".join(rule.describe() for rule in switch.needs)
            yield f"{switch.describe(args)} needs {needed}: {switch.needs[0].reason}."


def _describe_exclusion(switch: Switch, rule: Rule, args: Settings) -> str:
    end = "" if rule.reason.endswith(")") else "."
    both = f"{switch.describe(args)} cannot be combined with {rule.describe(args)}"
    return f"{both}: {rule.reason}{end}"


def _check_fp8(args: Settings) -> Iterator[str]:
    if args.fp8 and (args.fp16 or args.mixed_precision == "fp16"):
        yield (
            "--fp8 cannot be combined with fp16: everything around its products is in bf16. Use "
            "--mixed-precision bf16."
        )


def _check_optimizer_state(args: Settings) -> Iterator[str]:
    what = f"--optimizer-state-dtype {args.optimizer_state_dtype}"
    if args.optimizer_state_dtype == "fp32":
        return
    if args.optimizer not in ("adam", "adamw"):
        yield f"{what} needs --optimizer adam, got {args.optimizer}."
    if args.deepspeed is not None:
        yield (
            f"{what} cannot be combined with --deepspeed, which has its own optimizers: use "
            "--zero-1-memory-optimization, -2- or -3- instead."
        )
    if args.optimizer_state_dtype == "int8":
        yield from _check_int8_moments(args, what)


def _check_int8_moments(args: Settings, what: str) -> Iterator[str]:
    if find_spec("torchao") is None:
        yield str(MissingPackageError("torchao", what, "torchao"))
    for switch in SWITCHES:
        if switch.name in _SPLIT_MOMENTS and switch.is_on(args):
            yield (
                f"{switch.describe(args)} cannot be combined with {what}: moments are quantized in "
                "blocks, which cannot be split. Use --optimizer-state-dtype bf16, or leave one of "
                "them out."
            )


def _check_ranks(args: Settings) -> Iterator[str]:
    """Tensor, pipeline and context sizes divide the ranks; the expert size divides the rest."""
    sizes = {name: getattr(args, name) for name in AXES_OF_A_SAMPLE if getattr(args, name) > 1}
    ranks = math.prod(sizes.values())
    if args.world_size % ranks:
        given = " x ".join(f"{to_flag(name)} {size}" for name, size in sizes.items())
        total = f" = {ranks}" if len(sizes) > 1 else ""
        if args.world_size == 1:
            yield (
                f"{given}{total} needs a multiple of {ranks} ranks, and this run has one: start "
                f"more with --nproc-per-node {ranks}."
            )
            return
        fitting = [str(n) for n in range(1, args.world_size + 1) if args.world_size % n == 0]
        yield (
            f"{given}{total} does not divide the {args.world_size} ranks of this run: "
            f"use {' or '.join(fitting)}, or start a multiple of {ranks} ranks (--nproc-per-node)."
        )
        return
    if args.data_parallel not in (None, args.world_size // ranks):
        given = " x ".join(f"{to_flag(name)} {size}" for name, size in sizes.items())
        yield (
            f"--data-parallel {args.data_parallel}{' x ' if given else ''}{given} is not the "
            f"{args.world_size} ranks of this run: use --data-parallel {args.world_size // ranks}, "
            f"or start {args.data_parallel * ranks} ranks (--nproc-per-node)."
        )
    replicas = args.world_size // ranks * args.context_parallel_size
    experts = args.expert_model_parallel_size
    if experts > 0 and replicas % experts:
        fitting = [str(n) for n in range(1, replicas + 1) if replicas % n == 0]
        yield (
            f"--expert-model-parallel-size {experts} does not divide the {replicas} ranks with "
            f"different tokens: use {' or '.join(fitting)}."
        )
    yield from _check_hybrid_sharding(args, replicas)


def _check_hybrid_sharding(args: Settings, replicas: int) -> Iterator[str]:
    """Each group has a complete copy of the state, so groups must be equal and hold whole
    sequences.
    """
    size, context = args.hybrid_sharding_size, args.context_parallel_size
    if size is None or size < 1:
        return
    if replicas % size or size % context:
        fitting = [str(n) for n in range(1, replicas + 1) if not replicas % n and not n % context]
        whole = f" of whole sequences ({context} ranks each)" if context > 1 else ""
        yield (
            f"--hybrid-sharding-size {size} does not divide the {replicas} data-parallel ranks "
            f"into equal groups{whole}: use {' or '.join(fitting)}."
        )
