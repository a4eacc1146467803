"""The rules between switches, and between switches and the ranks of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec

from rapidformer.config.settings import Settings
from rapidformer.config.switches import SWITCHES, to_flag
from rapidformer.errors import MissingPackageError, count, end_sentence
from rapidformer.nearest import find_nearest

# Ranks along these axes work on the same samples.
AXES_OF_A_SAMPLE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
)  # fmt: skip


def find_layout_problems(args: Settings) -> Iterator[str]:
    """Switches that do not combine, as their rows state, and sizes that do not divide the ranks."""
    for switch in SWITCHES:
        contradiction = switch.find_contradiction(args)
        if contradiction:
            yield f"{' and '.join(contradiction)} exclude each other: give only one of them."
        if not switch.is_on(args):
            continue
        for rule in switch.excludes if switch.is_asked(args) else ():
            if rule.if_asked == "refused" and rule.holds(args):
                both = f"{switch.describe(args)} cannot be combined with {rule.describe(args)}"
                yield f"{both}: {end_sentence(rule.reason)}"
        if switch.is_refused_alone and not any(rule.is_given(args) for rule in switch.needs):
            needed = " or ".join(rule.describe() for rule in switch.needs)
            yield f"{switch.describe(args)} needs {needed}: {switch.needs[0].reason}."
        if switch.package and find_spec(switch.package) is None:
            yield str(MissingPackageError(switch.package, switch.describe(args), switch.package))
    known = [switch.word for switch in SWITCHES if switch.has_word]
    for word in args.without or ():
        if word not in known:
            near = find_nearest(word, known)
            hint = f"did you mean {near}?" if near else f"use some of {', '.join(known)}."
            yield f"--without {word}: there is no such change, or it cannot be left out; {hint}"
    yield from _check_ranks(args)


def _check_ranks(args: Settings) -> Iterator[str]:
    """Tensor, pipeline and context sizes divide the ranks; the expert size divides the rest."""
    sizes = {name: getattr(args, name) for name in AXES_OF_A_SAMPLE if getattr(args, name) > 1}
    ranks = math.prod(sizes.values())
    given = " x ".join(f"{to_flag(name)} {size}" for name, size in sizes.items())
    if args.world_size % ranks:
        total = f" = {ranks}" if len(sizes) > 1 else ""
        if args.world_size == 1:
            yield (
                f"{given}{total} needs a multiple of {ranks} ranks, and this run has one: start "
                f"more with --nproc-per-node {ranks}."
            )
            return
        choices = " or ".join(list_divisors(args.world_size))
        yield (
            f"{given}{total} does not divide the {args.world_size} ranks of this run: "
            f"use {choices}, or start a multiple of {ranks} ranks (--nproc-per-node)."
        )
        return
    if args.data_parallel not in (None, args.world_size // ranks):
        yield (
            f"--data-parallel {args.data_parallel}{' x ' if given else ''}{given} is not the "
            f"{args.world_size} ranks of this run: use --data-parallel {args.world_size // ranks}, "
            f"or start {args.data_parallel * ranks} ranks (--nproc-per-node)."
        )
    replicas = args.world_size // ranks * args.context_parallel_size
    experts = args.expert_model_parallel_size
    if experts > 0 and replicas % experts:
        yield (
            f"--expert-model-parallel-size {experts} does not divide the {count(replicas, 'rank')} "
            f"with different tokens: use {' or '.join(list_divisors(replicas))}."
        )
    yield from _check_hybrid_sharding(args, replicas)


def _check_hybrid_sharding(args: Settings, replicas: int) -> Iterator[str]:
    """Each group has a complete copy of the state: groups are equal and hold whole sequences."""
    size, context = args.hybrid_sharding_size, args.context_parallel_size
    if size is None or size < 1:
        return
    if replicas % size or size % context:
        fitting = [number for number in list_divisors(replicas) if not int(number) % context]
        whole = f" of whole sequences ({context} ranks each)" if context > 1 else ""
        yield (
            f"--hybrid-sharding-size {size} does not divide the "
            f"{count(replicas, 'data-parallel rank')} into equal groups{whole}: use "
            f"{' or '.join(fitting)}."
        )


def list_divisors(number: int) -> list[str]:
    """The numbers that divide this one, as text."""
    return [str(n) for n in range(1, number + 1) if number % n == 0]


def list_choices(number: int) -> str:
    """The divisors of a number as text: the possible choices."""
    *choices, last = list_divisors(number)
    return f"{', '.join(choices)} or {last}" if choices else last
