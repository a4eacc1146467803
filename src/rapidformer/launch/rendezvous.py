"""How the agents of a run find each other, and again after every failure.

A rendezvous handler for torch's elastic agent with fixed node numbers. A *round* starts when every
node has joined it, and a node that needs a restart asks for the next one, so all restart together.
Node 0's agent holds the store. The workers get a new one each round: old keys would mislead them.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from rapidformer.errors import count
from rapidformer.launch.environment import LaunchPlan
from rapidformer.launch.failures import Failure, WorkerError, choose_first

_POLL_SECONDS = 0.1
_LOOK_SECONDS = 0.3
ALIVE_SECONDS = 1.0
"""How often each node says that it is there."""
_LOST_SECONDS = 30.0
_FAREWELL_SECONDS = 5.0
# A host name may become known while a cluster starts, but not after minutes.
_NAME_SECONDS = 30.0


class RefusedError(WorkerError):
    """This node may not take part; the run itself continues."""


class Rounds(RendezvousHandler):
    """This node's view of the rounds."""

    def __init__(self, plan: LaunchPlan, *, max_restarts: int, timeout_seconds: float) -> None:
        self.plan, self.max_restarts, self._timeout = plan, max_restarts, timeout_seconds
        self.round = -1
        self._looked_at = 0.0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._worker_store: TCPStore | None = None
        self._is_closed = False
        self._token = uuid.uuid4().hex
        self.store = self._open_store()
        with self._losing_node_0():
            if plan.node_rank == 0:
                self.store.set("run", uuid.uuid4().hex)
            self._run_id = self._wait_for("run").decode()
            self.store.set(f"host/{plan.node_rank}", socket.gethostname())

    # ---- called by torch's agent ---------------------------------------------------------------

    def get_backend(self) -> str:
        return "rapidformer"

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round and wait until every node has."""
        deadline = time.monotonic() + self._timeout
        with self._losing_node_0():
            self.round = self._ask_for_round() if self.round >= 0 else self._enter()
            while missing := self._join():
                if time.monotonic() > deadline:
                    names = ", ".join(self.describe_node(node) for node in missing)
                    raise WorkerError(
                        f"{names} did not come within {self._timeout / 60:g} minutes "
                        "(--distributed-timeout-minutes): is the command running there, with the "
                        f"same NNODES, and can it reach {self.plan.endpoint}?"
                    )
                time.sleep(_POLL_SECONDS)
            key = f"port/{self.round}"
            if self.plan.node_rank == 0:
                address = self.plan.master_addr
                self._worker_store = TCPStore(address, 0, None, True, wait_for_workers=False)
                self.store.set(key, str(self._worker_store.port))
            port = int(self._wait_for(key))
        self._seen.clear()
        store, plan = PrefixStore(f"round/{self.round}", self.store), self.plan
        workers = RendezvousStoreInfo(plan.master_addr, port)
        return RendezvousInfo(store, plan.node_rank, plan.nodes, workers)

    def num_nodes_waiting(self) -> int:
        """Whether this node's workers must stop for a new round; raises if the run is over."""
        if self.plan.nodes == 1 or time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return 0
        self._looked_at = time.monotonic()
        with self._losing_node_0():
            self._raise_if_closed()
            if self._get_round() != self.round:
                return 1
            lost = self._find_lost_nodes()
            if not lost:
                return 0
            if self.round < self.max_restarts:
                return 1  # the agent calls next_rendezvous again, which asks for a round
            names = ", ".join(self.describe_node(node) for node in lost)
            raise WorkerError(f"{names} has been silent for {_LOST_SECONDS:.0f} s.")

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def shutdown(self) -> bool:
        self._is_closed = True
        return True

    def publish_failure(self, failure: Failure) -> None:
        with self._losing_node_0():
            self.store.set(
                f"failure/{self.round}/{self.plan.node_rank}", json.dumps(asdict(failure))
            )

    def read_failures(self, round_: int) -> list[Failure]:
        """What the nodes have published about a round."""
        with self._losing_node_0():
            texts = [self._read(f"failure/{round_}/{node}") for node in range(self.plan.nodes)]
            return [Failure(**json.loads(text)) for text in texts if text]

    def find_first_failure(self, failure: Failure) -> Failure:
        """The first failure of this round, on any node; this node's is one of them."""
        may_follow = failure.is_consequence and self.plan.nodes > 1
        deadline = time.monotonic() + (2.0 if may_follow else 0.0)
        while True:
            first = choose_first([failure, *self.read_failures(self.round)])
            if not first.is_consequence or time.monotonic() > deadline:
                return first
            time.sleep(_POLL_SECONDS)

    def close(self, message: str, exit_code: int) -> None:
        """End the run on every node with this message."""
        if self.plan.nodes == 1 or self._is_closed:
            return
        self._is_closed = True
        try:
            word = json.dumps({"message": message, "exit_code": exit_code})
            self.store.compare_set("closed", "", word)
            self.leave()
        except RuntimeError:
            pass  # node 0 is gone already, and with it everyone who would need to know

    def leave(self) -> None:
        """Sign off; node 0 holds the store, so it goes last."""
        self.store.set(f"left/{self.plan.node_rank}", "1")
        if self.plan.node_rank == 0:
            here = [n for n in range(self.plan.nodes) if self.store.check([f"host/{n}"])]
            keys = [f"left/{node}" for node in here]
            self._wait_for_keys(keys, time.monotonic() + _FAREWELL_SECONDS)

    def finish(self) -> None:
        """Wait until the workers of every node have finished."""
        if self.plan.nodes == 1:
            return
        with self._losing_node_0():
            self.store.set(f"done/{self.round}/{self.plan.node_rank}", "1")
            keys = [f"done/{self.round}/{node}" for node in range(self.plan.nodes)]
            while not self._wait_for_keys(keys, time.monotonic() + _LOOK_SECONDS):
                self._raise_if_closed()
                if self._get_round() != self.round:
                    raise WorkerError("another node failed after this one had finished.")
            self.leave()

    def describe_node(self, node: int) -> str:
        return f"node {node} ({self._read(f'host/{node}').decode() or 'never seen'})"

    def say_alive(self, store: TCPStore, beat: int) -> None:
        """Called regularly by the watching thread, on its own connection."""
        store.set(f"alive/{self.plan.node_rank}", f"{self._token} {beat}")

    def open_client(self) -> TCPStore:
        """A separate connection, so that a waiting call does not block another thread."""
        return _connect(self.plan.master_addr, self.store.port, self._timeout)

    def _open_store(self) -> TCPStore:
        plan = self.plan
        if plan.node_rank == 0:
            try:
                port, limit = plan.master_port * (plan.nodes > 1), timedelta(seconds=self._timeout)
                return TCPStore(plan.master_addr, port, None, True, limit, wait_for_workers=False)
            except RuntimeError as reason:
                raise WorkerError(
                    f"node 0 cannot listen at port {plan.master_port}: "
                    f"{str(reason).splitlines()[0].rsplit('message: ', 1)[-1]}. "
                    "Choose another --master-port (MASTER_PORT) on every node."
                ) from None
        _wait_for_port(plan.master_addr, plan.master_port, self._timeout)
        return _connect(plan.master_addr, plan.master_port, self._timeout)

    def _enter(self) -> int:
        """The round for a node that has just arrived; a returning node starts a new one."""
        current = int(self.store.compare_set("round", "", "0"))
        if not self.store.check([f"joined/{current}/{self.plan.node_rank}"]):
            return current
        # Two nodes with the same number would keep evicting each other.
        key = f"alive/{self.plan.node_rank}"
        before, deadline = self._read(key), time.monotonic() + 3.5 * ALIVE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            if self._read(key) != before:
                raise self._build_double_error()
        self.round = current
        try:
            return self._ask_for_round()
        except WorkerError as error:
            raise RefusedError(str(error), error.exit_code) from None

    def _build_double_error(self) -> RefusedError:
        return RefusedError(
            f"{self.describe_node(self.plan.node_rank)} is taking part already: every node needs "
            "a NODE_RANK of its own."
        )

    def _ask_for_round(self) -> int:
        wanted = self.round + 1
        if wanted > self.max_restarts:
            raise WorkerError(
                "a node came back, but the run has used up its "
                f"{count(self.max_restarts, 'restart')} (--max-restarts)."
            )
        return int(self.store.compare_set("round", str(self.round), str(wanted)))

    def _join(self) -> list[int]:
        """Enter the newest round; returns the nodes that are still missing."""
        self._raise_if_closed()
        self.round = max(self.round, self._get_round())
        key = f"joined/{self.round}/{self.plan.node_rank}"
        if self.store.compare_set(key, "", self._token).decode() != self._token:
            raise self._build_double_error()
        nodes = range(self.plan.nodes)
        if self.store.check([f"joined/{self.round}/{node}" for node in nodes]):
            return []
        return [n for n in nodes if not self.store.check([f"joined/{self.round}/{n}"])]

    def _get_round(self) -> int:
        return int(self._read("round") or 0)

    def _read(self, key: str) -> bytes:
        """What is under a key; empty if nothing is."""
        return self.store.get(key) if self.store.check([key]) else b""

    def _wait_for(self, key: str) -> bytes:
        deadline = time.monotonic() + self._timeout
        while not self.store.check([key]):
            self._raise_if_closed()
            if time.monotonic() > deadline:
                raise WorkerError(f"node 0 ({self.plan.endpoint}) does not go on.")
            time.sleep(_POLL_SECONDS / 5)
        return bytes(self.store.get(key))

    def _wait_for_keys(self, keys: list[str], deadline: float) -> bool:
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS / 2)
        return True

    def _raise_if_closed(self) -> None:
        if closed := self._read("closed"):
            word = json.loads(closed)
            self._is_closed = True
            self.leave()
            raise WorkerError(word["message"], word["exit_code"])

    def _find_lost_nodes(self) -> list[int]:
        """Nodes whose agent has stopped reporting."""
        now, lost = time.monotonic(), []
        for node in range(self.plan.nodes):
            beat = self._read(f"alive/{node}")
            if node not in self._seen or self._seen[node][0] != beat:
                self._seen[node] = (beat, now)
            elif now - self._seen[node][1] > _LOST_SECONDS and node != self.plan.node_rank:
                lost.append(node)
        return lost

    @contextmanager
    def _losing_node_0(self) -> Iterator[None]:
        """Explain a broken connection to the store."""
        try:
            yield
        except RuntimeError as reason:
            raise WorkerError(
                f"the connection to node 0 ({self.plan.endpoint}) is lost: has it ended? "
                f"({str(reason).splitlines()[0][:200]})"
            ) from None


def _connect(address: str, port: int, timeout_seconds: float) -> TCPStore:
    limit = timedelta(seconds=timeout_seconds)
    return TCPStore(address, port, None, False, limit, wait_for_workers=False)


def _wait_for_port(address: str, port: int, timeout_seconds: float) -> None:
    """Wait for node 0 to listen, without torch's many log lines."""
    started = time.monotonic()
    deadline = started + timeout_seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return
        except OSError as reason:
            if isinstance(reason, socket.gaierror):
                deadline = min(deadline, started + _NAME_SECONDS)
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"node 0 cannot be reached at {address}:{port} ({reason}), tried for "
                    f"{deadline - started:.0f} s: is it running, and are MASTER_ADDR and "
                    "MASTER_PORT right?"
                ) from None
        time.sleep(_POLL_SECONDS)
