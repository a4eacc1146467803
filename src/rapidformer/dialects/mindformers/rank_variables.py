"""Translate MindSpore's rank variables to torch's.

Its launchers set RANK_ID, RANK_SIZE, DEVICE_ID and RANK_TABLE_FILE. They are translated once, when
the library is imported, so that the rest of the code knows only RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT. If torch's variables are set, nothing is changed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from rapidformer.errors import ConfigurationError

_FIRST_PORT, _PORTS = 20000, 10000


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
