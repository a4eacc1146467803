"""The processes of a run: rank, world size and device.

A launcher sets RANK, LOCAL_RANK and WORLD_SIZE. Some platforms use RANK and WORLD_SIZE for nodes,
so without LOCAL_RANK they are ignored. A script may also start a process group by itself.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from rapidformer.compat.torch_distributed import get_default_store
from rapidformer.config.derive import is_launched
from rapidformer.dist.attendance import start_roll, stop_roll
from rapidformer.dist.heartbeat import start_heartbeat
from rapidformer.errors import ConfigurationError

_GLOO_CHECKS, _GLOO_PAUSE = 100, 0.01


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process among those of the run."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def get_world_size_from_environment() -> int:
    """Number of processes the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if is_launched() else 1


def follow_own_group() -> None:
    """Set what a launcher sets, if the script has started its processes and their group itself.

    Otherwise each of them would train alone, into the same folder. The variables stay. A GPU that
    the script has chosen is kept.
    """
    if is_launched() or not (dist.is_available() and dist.is_initialized()):
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1:
        local_rank = _count_before_on_host(rank) % (torch.cuda.device_count() or world_size)
        if torch.cuda.is_initialized() and torch.cuda.current_device():
            local_rank = torch.cuda.current_device()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ.setdefault("LOCAL_RANK", str(local_rank))


def _count_before_on_host(rank: int) -> int:
    """How many lower ranks are on this machine; it waits for them alone, not for all."""
    store, host = get_default_store(), socket.gethostname()
    store.set(f"rapidformer/host/{rank}", host)
    before = store.multi_get([f"rapidformer/host/{lower}" for lower in range(rank)])
    return before.count(host.encode())


def start_processes(*, device: str = "auto", timeout_minutes: float = 10.0) -> Processes:
    """Join the other processes of the run, or continue alone if there are none."""
    follow_own_group()
    rank = int(os.environ["RANK"]) if is_launched() else 0
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    world_size = get_world_size_from_environment()
    start_heartbeat(rank)
    chosen = _choose_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world_size > 1 and not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        _start_group(backend, timedelta(minutes=timeout_minutes))
    start_roll()
    return Processes(rank=rank, local_rank=local_rank, world_size=world_size, device=chosen)


_stores: dict[tuple[str | None, ...], Any] = {}
"""Where the ranks have found each other, by address and port; kept, as a rank that starts its next
group sooner than rank 0 has left the last one would otherwise find a store that is about to end."""
_numbers = count()


def _start_group(backend: str, timeout: timedelta) -> None:
    """Start the process group, in a part of the store that no earlier one has written to.

    An earlier group's store has the addresses of connections that are gone. It lives on as long as
    anything holds that group, such as a mesh, and for as long as the launcher if it is that one's.
    """
    place = tuple(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT")))
    if place not in _stores:
        _stores[place] = next(rendezvous("env://", timeout=timeout))
    whole, rank, world_size = _stores[place]
    store = PrefixStore(f"rapidformer/{next(_numbers)}", whole)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def stop_processes() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        stop_roll()
        _wait_for_gloo()
        dist.destroy_process_group()


def _wait_for_gloo() -> None:
    """Wait, for a second at most, until gloo's threads have released the last exchange's tensors.

    They do so shortly after the exchange has returned. Groups that a device mesh still holds keep
    their threads until the interpreter exits, and one that needs the interpreter's lock by then (to
    release a tensor's Python object) aborts the process.
    """
    for _ in range(_GLOO_CHECKS):
        time.sleep(_GLOO_PAUSE)  # releases the lock
        if "R" not in _read_gloo_states():
            return


def _read_gloo_states() -> set[str]:
    """The states of gloo's threads: running (R) or sleeping (S); none except on Linux."""
    states = set()
    for path in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # a thread that has just ended
            _, _, rest = path.read_text().partition("(")
            name, _, fields = rest.rpartition(")")
            if "gloo" in name:
                states.add(fields.split()[0])
    return states


def _choose_device(device: str, local_rank: int) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigurationError(
            "--device cuda: torch sees no GPU here. Leave --device out to compute on the CPU."
        )
    if local_rank >= count:
        raise ConfigurationError(
            f"process {local_rank} on this node has no GPU of its own: {count} visible. "
            f"Use --nproc-per-node {count} or less, or --device cpu."
        )
    return torch.device("cuda", local_rank)


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU ({threads} thread{'s' * (threads > 1)} per process)"
