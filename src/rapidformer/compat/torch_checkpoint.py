"""What torch's checkpoints pickle into their index: the only names we unpickle."""

from __future__ import annotations

PRIVATE_NAMES = {
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": "reading a checkpoint's index",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "reading a checkpoint's index",
    "torch.serialization._get_layout": "reading a checkpoint's index",
}

PRIVATE_INDEX_NAMES = frozenset(
    (name.rpartition(".")[0], name.rpartition(".")[2]) for name in PRIVATE_NAMES
)
"""(module, name) of each."""
