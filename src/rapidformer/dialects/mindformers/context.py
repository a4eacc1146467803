"""``init_context`` of MindFormers: joins the other ranks, and remembers its arguments.

MindSpore's launchers set RANK_ID, RANK_SIZE, DEVICE_ID and RANK_TABLE_FILE. They are translated to
torch's variables when a script calls MindFormers' names, so that the rest of the code knows only
RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. If those are set, nothing is changed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer.dist.processes import start_processes
from rapidformer.errors import ConfigurationError
from rapidformer.log import say_once

_FIRST_PORT, _PORTS = 20000, 10000
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
        _say_unused("ContextConfig", options)


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
        _say_unused("ParallelContextConfig", options)


def _say_unused(name: str, options: dict[str, Any]) -> None:
    if options:
        say_once(f"{name}: not used here: {', '.join(options)}.")


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
    adopt_rank_variables(os.environ)
    target = (context_config or ContextConfig()).device_target
    parallel = parallel_config or ParallelContextConfig("DATA_PARALLEL")
    device = "cpu" if target.upper() == "CPU" else None
    _current[0] = Context(
        device=device,
        splits_models=use_parallel and parallel.parallel_mode.endswith("AUTO_PARALLEL"),
        shards_optimizer=use_parallel and parallel.enable_parallel_optimizer,
    )
    processes = start_processes(device=device or "auto")
    if processes.world_size > 1 and not use_parallel:
        raise ConfigurationError(
            f"init_context(use_parallel=False), but {processes.world_size} processes were started: "
            "each would train its own model. Pass use_parallel=True, or start one process."
        )
    return processes.rank, processes.world_size


def adopt_rank_variables(environment: MutableMapping[str, str]) -> None:
    """Set torch's variables from MindSpore's, if one of its launchers has set those."""
    if "LOCAL_RANK" in environment or not {"RANK_ID", "RANK_SIZE"} <= environment.keys():
        return
    rank, size = (_read_number(environment, name) for name in ("RANK_ID", "RANK_SIZE"))
    if size == 1:
        return
    if not 0 <= rank < size:
        raise ConfigurationError(f"RANK_ID is {rank}, but it must be below RANK_SIZE {size}.")
    table = environment.get("RANK_TABLE_FILE", "").strip()
    address, port = _read_meeting_place(Path(table), size) if table else ("127.0.0.1", _FIRST_PORT)
    device = environment.get("DEVICE_ID", "").strip() or str(rank)
    environment.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=device)
    environment.setdefault("MASTER_ADDR", address)
    environment.setdefault("MASTER_PORT", str(port))


def _read_meeting_place(table: Path, size: int) -> tuple[str, int]:
    """The first server of a rank table, and a port that every node finds by itself."""
    try:
        text = table.read_text(encoding="utf-8")
        servers: list[dict[str, Any]] = json.loads(text)["server_list"]
        address = str(servers[0]["server_id"])
        devices = sum(len(server["device"]) for server in servers)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as reason:
        raise ConfigurationError(
            f"RANK_TABLE_FILE={table} is not a rank table with a server_list: {reason!r}."
        ) from None
    if devices != size:
        raise ConfigurationError(
            f"RANK_SIZE is {size}, but {table} lists {devices} devices: they must be equal."
        )
    return address, _FIRST_PORT + zlib.crc32(text.encode()) % _PORTS


def _read_number(environment: MutableMapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not text.isdecimal():
        raise ConfigurationError(f"{name} must be a whole number, got {text!r}.")
    return int(text)
