"""Two "nodes" on this machine: network namespaces of their own, joined by a cable of the kernel's.

Where namespaces are not permitted, the nodes are two addresses of the loop-back interface: the same
commands run, only the network between them is not a separate one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TestNode:
    """Where a command of a node runs."""

    __test__ = False

    address: str
    namespace: str | None = None
    variables: dict[str, str] = field(default_factory=dict)


@contextmanager
def make_two_nodes() -> Iterator[list[TestNode]]:
    names = [f"rapidformer{os.getpid()}{letter}" for letter in "ab"]
    try:
        is_permitted = _connect(names)
        if is_permitted:
            yield [
                TestNode(f"10.231.0.{i + 1}", name, {"GLOO_SOCKET_IFNAME": f"rf{os.getpid()}{i}"})
                for i, name in enumerate(names)
            ]
        else:
            yield [TestNode("127.0.0.1"), TestNode("127.0.0.2")]
    finally:
        for name in names:
            _ip("netns", "delete", name)


def _connect(names: list[str]) -> bool:
    ends = [f"rf{os.getpid()}{i}" for i in range(2)]
    commands = [("netns", "add", name) for name in names]
    commands.append(("link", "add", ends[0], "type", "veth", "peer", "name", ends[1]))
    for index, (name, end) in enumerate(zip(names, ends, strict=True)):
        commands += [
            ("link", "set", end, "netns", name),
            ("-n", name, "address", "add", f"10.231.0.{index + 1}/24", "dev", end),
            ("-n", name, "link", "set", end, "up"),
            ("-n", name, "link", "set", "lo", "up"),
        ]
    return all(_ip(*words) for words in commands)


def _ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
