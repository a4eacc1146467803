"""What an engine starts with; starting joins the process group, so all ranks start together."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from rapidformer.accel.compile.compilation import prepare as prepare_compilation
from rapidformer.accel.parallelize import check_device
from rapidformer.accel.precision.precision import Precision, choose_precision
from rapidformer.checkpoint.finding import continue_after_restart
from rapidformer.config import Settings, resolve
from rapidformer.config.switches import Situation
from rapidformer.context import set_context
from rapidformer.data.tokenizers.build import load_tokenizer
from rapidformer.dist.processes import start_processes
from rapidformer.dist.seeding import find_foreign_seed, seed_everything
from rapidformer.dist.topology import Topology, build_topology
from rapidformer.engine.unused_settings import find_idle_settings
from rapidformer.foreign_names import get_foreign_flags
from rapidformer.log import configure_logging, warn_once
from rapidformer.optim.observer import get_observer
from rapidformer.timers import Timers


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """This process among those of the run."""

    device: torch.device
    topology: Topology
    precision: Precision
    is_main: bool
    """Whether this is rank 0."""


def start_run(asked: Settings) -> tuple[Settings, Runtime]:
    """Join the other processes; returns the settings with all that follows from them."""
    asked = get_observer().change_settings(asked)
    configure_logging(asked.log_level)
    minutes = asked.distributed_timeout_minutes
    processes = start_processes(device=asked.device, timeout_minutes=minutes)
    asked = continue_after_restart(asked)
    args = resolve(asked, world_size=processes.world_size, rank=processes.rank)
    topology = build_topology(
        processes.device.type,
        pipeline=args.pipeline_model_parallel_size, data=args.data_parallel_size,
        context=args.context_parallel_size, tensor=args.tensor_model_parallel_size,
        expert=args.expert_model_parallel_size, sharding=args.hybrid_sharding_size,
    )  # fmt: skip
    precision = choose_precision(args.mixed_precision, processes.device)
    check_device(args, processes.device, precision)
    # Nothing of the engine: the context outlives it.
    build_tokenizer = functools.partial(load_tokenizer, args)
    set_context(args=args, timers=Timers(), build_tokenizer=build_tokenizer)
    situation = Situation(device=processes.device.type, precision=precision.name)
    _warn_about_settings_without_effect(args, situation)
    _warn_about_seed(args)
    seed_everything(args.seed, deterministic=args.deterministic)
    prepare_compilation(args, processes.device)
    return args, Runtime(
        device=processes.device, topology=topology, precision=precision, is_main=processes.is_main
    )


def _warn_about_seed(args: Settings) -> None:
    """A script that seeds torch expects its dropout and the order of its data to follow."""
    seed = None if args.is_given("seed") else find_foreign_seed()
    if seed not in (None, args.seed):
        warn_once(
            f"dropout and the order of shuffled data follow --seed, which is {args.seed}, not the "
            f"seed that the script has given torch ({seed}). Say it to the engine: "
            f'RapidformerEngine(args={{"seed": {seed}, ...}}) or --seed {seed}.'
        )


def _warn_about_settings_without_effect(args: Settings, situation: Situation) -> None:
    idle = get_foreign_flags().find_idle(args.extras, args.task)
    for message in [*idle, *find_idle_settings(args, situation)]:
        warn_once(message)
