"""A Python that starts at once: it forks a process which has imported torch and transformers.

The tests start hundreds of commands as a user would, and importing takes each of them five seconds
of processor time. ``start_warm_python`` gives the path of an executable that takes Python's own
arguments (``script.py``, ``-m module``, ``-c code``) and behaves like it: same working folder,
environment, network namespace, files, signals and exit status. Its ``sys.executable`` is itself, so
what a launcher starts is fast too. Called with ``-P`` it is the real Python: whoever gives that
flag (the proof of an export) wants a process that has imported nothing of ours. Ranks are real
Pythons, too, where ``REAL_RANKS_VARIABLE`` is set.

Two processes stand for one: the client, which the caller sees and signals, and the fork, which
does the work. The client passes signals on, and the fork is killed when the client dies. A rank is
tied to its launcher, so its client is, too.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import gc
import importlib.util
import marshal
import os
import pkgutil
import random
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from rapidformer.launch.worker import HEARTBEAT_VARIABLE

TIED_VARIABLE = "RAPIDFORMER_TEST_RANK"
"""Set for a process that is to be killed when the one that started it dies."""

REAL_RANKS_VARIABLE = "RAPIDFORMER_TEST_REAL_RANKS"
"""Set where ranks are to lead process groups of their own, which a fork of the server does not."""

MOST_FILES = 250
"""As many descriptors as fit into one message."""

SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Keeps importing from starting threads: OpenBLAS starts some, and so does the jemalloc that
pyarrow brings along on x86."""

PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000
"""The kind of namespace that ``setns`` enters: a network's."""

MODELS = (
    "apertus", "bert", "deberta_v2", "deepseek_v2", "gemma2", "gpt2", "gpt_oss", "llama", "mistral",
    "mixtral", "phi3", "qwen3", "roberta", "t5", "vit",
)  # fmt: skip
SLOW = (
    "datasets", "deepspeed", "peft", "pytest", "rapidformer", "torch._inductor.compile_fx",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.run", "torch.distributed.tensor.experimental", "torch.utils.tensorboard",
    "torchmetrics", "transformers.models.auto.modeling_auto",
    *(f"transformers.models.{name}.modeling_{name}" for name in MODELS),
)  # fmt: skip

CLIENT = """#!{python} -IS
import _signal, _socket, marshal, os, sys
is_rank = "RANK" in os.environ and {heartbeats!r} in os.environ
if sys.argv[1:2] == ["-P"] or is_rank and {real_ranks!r} in os.environ:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
if {tied!r} in os.environ or is_rank:
    import ctypes
    ctypes.CDLL(None).prctl({death_signal}, _signal.SIGKILL)
files = []
for name in os.listdir("/proc/self/fd"):
    try:
        os.fstat(int(name))
        if os.get_inheritable(int(name)):
            files.append(int(name))
    except OSError:
        pass
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect({address!r})
passed = b"".join(name.to_bytes({file_size}, sys.byteorder) for name in files)
server.sendmsg([b"c"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, passed)])
call = marshal.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), files])
server.sendall(b"%d\\n" % len(call) + call)
with open(server.detach(), "rb", buffering=0) as channel:
    fork = int(channel.readline())
    def pass_on(number, frame):
        try:
            os.kill(fork, number)
        except ProcessLookupError:
            pass
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        number = getattr(_signal, name)
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, pass_on)
    for name in files:
        os.close(name)
    status = int(channel.readline() or -9)
if status < 0:
    _signal.signal(-status, _signal.SIG_DFL) if status != -9 else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""
"""Of Python's library, only what is built in: the rest takes longer than the client runs."""


@cache
def get_warm_python() -> Path:
    """The executable for this test run: one for all of xdist's workers."""
    # Not below pytest's tmp_path, which is long: a socket's path may have 107 characters.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = Path(tempfile.gettempdir()) / f"warm-{run or os.getpid()}"
    # A worker's parent is the controller, which outlives all workers.
    return share_warm_python(folder, os.getppid() if run else os.getpid())


@contextmanager
def start_warm_python(folder: Path) -> Iterator[Path]:
    """The executable, with a ``rapidformer`` command beside it; they work until the block ends."""
    server = _start(folder, os.getpid())
    try:
        yield folder / "python"
    finally:
        server.kill()
        server.wait()


def share_warm_python(folder: Path, owner: int) -> Path:
    """The same for several processes: the first to ask starts it, and it ends with ``owner``."""
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir(mode=0o700)
            _start(folder, owner, "--remove")
    return folder / "python"


def _start(folder: Path, owner: int, *flags: str) -> subprocess.Popen[bytes]:
    """Write the commands and wait for the server, which ends with the process ``owner``."""
    client = folder / "python"
    client.write_text(
        CLIENT.format(
            python=sys.executable,
            address=str(folder / "s"),
            heartbeats=HEARTBEAT_VARIABLE,
            real_ranks=REAL_RANKS_VARIABLE,
            tied=TIED_VARIABLE,
            death_signal=PR_SET_PDEATHSIG,
            file_size=array.array("i").itemsize,
        )
    )
    client.chmod(0o755)
    command = folder / "rapidformer"
    command.write_text(f'#!/bin/sh\nexec {client} -m rapidformer.cli.main "$@"\n')
    command.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, str(folder), str(owner), *flags],
        stdout=subprocess.PIPE,
        env={**os.environ, **SINGLE_THREAD},
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return server


# ---- the server ----------------------------------------------------------------------------------


def _serve(folder: Path, owner: int, is_folder_removed: bool) -> None:
    """Fork once per client, until the owner ends. Returns in a fork when its call has run."""
    life = os.pidfd_open(owner)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "s"))
    listener.listen(64)
    gc.disable()  # it takes a third of the time of importing, and finds nothing
    _import_what_is_slow()
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{len(threads)} threads after importing: forks would inherit locks"
    gc.freeze()
    gc.enable()
    print("ready", flush=True)
    workers = _Workers(life, listener.fileno())
    while (file := workers.wait()) != life:
        if file != listener.fileno():
            workers.settle(file)
            continue
        client, _ = listener.accept()
        if worker := os.fork():
            workers.add(worker, client)
            continue
        listener.close()
        os.close(life)
        workers.close()
        _enter_network(client)
        client = _move(client)
        call = _receive(client)
        client.close()
        return _run(call, str(folder / "python"))
    workers.kill()
    if is_folder_removed:
        shutil.rmtree(folder, ignore_errors=True)
        Path(f"{folder}.lock").unlink(missing_ok=True)
    return None


def _import_what_is_slow() -> None:
    suit_torch_to_small_models()  # forks inherit it
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed does not search, and says nothing
    for name in SLOW:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            continue  # an optional package
        importlib.import_module(name)
    rapidformer = sys.modules["rapidformer"]
    for name in rapidformer.__all__:
        getattr(rapidformer, name)
    # Not the dialects: importing one is what a script does to use its names.
    for module in pkgutil.walk_packages(rapidformer.__path__, "rapidformer."):
        if not module.name.startswith("rapidformer.dialects"):
            with suppress(ImportError):  # of optional packages
                importlib.import_module(module.name)
    sys.modules["rapidformer.config"].parse_arguments([])  # the parser is built once
    with suppress(ImportError):  # of an older version
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("bert")  # once for all models: 600 patterns are compiled


def suit_torch_to_small_models() -> None:
    """Leave out what takes longer than such small products, here and in pytest's processes."""
    import torch

    torch.backends.mkldnn.enabled = False  # calling oneDNN: a tenth of an update on ARM
    if torch.backends.cuda.is_built():
        return
    # ``torch.manual_seed`` notes for each kind of device, with the stack of the call, that it is to
    # be seeded later: 3 % of the tests' time, for devices that this torch cannot use.
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = _seed_nothing


def _seed_nothing(seed: int) -> None:
    pass


class _Workers:
    """The forks under way, and the clients that wait for them."""

    def __init__(self, *files: int) -> None:
        self._ready = select.poll()
        for file in files:
            self._ready.register(file, select.POLLIN)
        self._by_end: dict[int, tuple[int, socket.socket]] = {}
        self._by_client: dict[int, int] = {}

    def wait(self) -> int:
        """The first file with something to read, or with a client that is gone."""
        return self._ready.poll()[0][0]

    def add(self, worker: int, client: socket.socket) -> None:
        client.sendall(f"{worker}\n".encode())
        ended = os.pidfd_open(worker)
        self._by_end[ended], self._by_client[client.fileno()] = (worker, client), worker
        self._ready.register(ended, select.POLLIN)
        self._ready.register(client, select.POLLRDHUP)  # what it sends is for the worker

    def settle(self, file: int) -> None:
        """Tell a client how its worker ended; kill a worker whose client is gone."""
        self._ready.unregister(file)
        if file in self._by_client:
            os.kill(self._by_client.pop(file), signal.SIGKILL)  # its end comes next
            return
        worker, client = self._by_end.pop(file)
        os.close(file)
        status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        if self._by_client.pop(client.fileno(), None) is not None:
            self._ready.unregister(client)
            with suppress(OSError):
                client.sendall(f"{status}\n".encode())
        client.close()

    def close(self) -> None:
        """In a fork: they are not its concern."""
        for ended, (_, client) in self._by_end.items():
            os.close(ended)
            client.close()

    def kill(self) -> None:
        for worker, _ in self._by_end.values():
            os.kill(worker, signal.SIGKILL)


def _enter_network(connection: socket.socket) -> None:
    """Tests start some clients in a network namespace; the server is not in it."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    theirs = Path(f"/proc/{struct.unpack('3i', peer)[0]}/ns/net")
    if not theirs.samefile("/proc/self/ns/net"):
        with theirs.open() as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0


def _move(connection: socket.socket) -> socket.socket:
    """To a number that no file of a client has: they get the numbers they have in the client."""
    return socket.socket(fileno=fcntl.fcntl(connection.detach(), fcntl.F_DUPFD_CLOEXEC, 500))


def _receive(connection: socket.socket) -> list[Any]:
    size = array.array("i").itemsize
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(MOST_FILES * size))
    received = array.array("i")
    for _, _, data in ancillary:
        received.frombytes(data[: len(data) - len(data) % size])
    with connection.makefile("rb") as channel:
        size_of_call = int(channel.readline())
        words, folder, variables, files = marshal.loads(channel.read(size_of_call))
    # Copied out of the way first: a received number may be one that is wanted for another file.
    free = 600
    copies = [os.dup2(file, free + i) for i, file in enumerate(received)]
    for file in received:
        os.close(file)
    for file, copy in zip(files, copies, strict=True):
        os.dup2(copy, file, inheritable=True)
        os.close(copy)
    return [words, folder, variables, files]


def _run(call: list[Any], executable: str) -> None:
    """Also exit at once, if nothing can go wrong: deleting thousands of modules takes a second.

    With threads, Python's own end is part of what is tested: some crash in it.
    """
    code: Any = None
    try:
        _become(call, executable)
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            raise
    threading._shutdown()  # type: ignore[attr-defined]
    if not _has_threads():
        _keep_operators()
    atexit._run_exitfuncs()
    if _has_threads():
        sys.exit(code)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)  # Python's own words for it
    os._exit((code or 0) & 0xFF)


def _has_threads() -> bool:
    return len(list(Path("/proc/self/task").iterdir())) > 1


def _keep_operators() -> None:
    """At exit, torch takes back 200 libraries of operators: half the time of a short command."""
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        _, function, *_ = finalizer.peek() or (None, None)
        if getattr(function, "__module__", None) == "torch.library":
            finalizer.atexit = False


def _become(call: list[Any], executable: str) -> None:
    """Run what the client was asked to run, as Python would."""
    import multiprocessing.spawn

    import numpy as np

    words, folder, variables, _ = call
    multiprocessing.spawn.set_executable(sys.executable)
    sys.executable = executable
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    random.seed()
    np.random.seed()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    while words[0] in ("-u", "-P"):
        words.pop(0)
    sys.path[1:1] = [path for path in variables.get("PYTHONPATH", "").split(":") if path]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = str(Path.cwd())
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0] = ""
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]), "--remove" in sys.argv)
