"""``init_context`` of MindFormers: joins the other ranks, and remembers its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rapidformer.dist.processes import start_processes
from rapidformer.errors import ConfigurationError

_MODES = ("DATA_PARALLEL", "SEMI_AUTO_PARALLEL", "AUTO_PARALLEL", "HYBRID_PARALLEL", "STAND_ALONE")


class ContextConfig:
    """Where to compute. Graph modes and Ascend's options mean nothing here."""

    def __init__(
        self,
        mode: int | str = 0,
        device_target: str = "Ascend",
        device_id: int | None = None,
        **options: Any,
    ) -> None:
        self.device_target = device_target


class ParallelContextConfig:
    """How the processes divide the work."""

    def __init__(
        self,
        parallel_mode: int | str = "STAND_ALONE",
        device_num: int | None = None,
        gradients_mean: bool = False,
        enable_parallel_optimizer: bool = False,
        full_batch: bool | None = None,
        **options: Any,
    ) -> None:
        word = _MODES[parallel_mode] if isinstance(parallel_mode, int) else parallel_mode.upper()
        if word not in _MODES:
            raise ConfigurationError(
                f"parallel_mode={parallel_mode!r} must be one of {', '.join(_MODES)}."
            )
        self.parallel_mode = word
        self.enable_parallel_optimizer = enable_parallel_optimizer


@dataclass(frozen=True, kw_only=True)
class Context:
    """The arguments of the latest ``init_context``."""

    device: str | None = None
    splits_models: bool = True
    """False in the modes that divide the data alone."""
    shards_optimizer: bool = False


_current = [Context()]


def get_context() -> Context:
    return _current[0]


def init_context(
    use_parallel: bool = False,
    context_config: ContextConfig | None = None,
    parallel_config: ParallelContextConfig | None = None,
) -> tuple[int, int]:
    """Join the other processes; returns this one's rank and how many there are."""
    target = (context_config or ContextConfig()).device_target
    parallel = parallel_config or ParallelContextConfig("DATA_PARALLEL")
    device = "cpu" if target.upper() == "CPU" else "auto"
    _current[0] = Context(
        device="cpu" if device == "cpu" else None,
        splits_models=use_parallel and parallel.parallel_mode.endswith("AUTO_PARALLEL"),
        shards_optimizer=use_parallel and parallel.enable_parallel_optimizer,
    )
    processes = start_processes(device=device)
    if processes.world_size > 1 and not use_parallel:
        raise ConfigurationError(
            f"init_context(use_parallel=False), but {processes.world_size} processes were started: "
            "each would train its own model. Pass use_parallel=True, or start one process."
        )
    return processes.rank, processes.world_size
