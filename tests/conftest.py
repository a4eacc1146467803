"""Everything here runs without a network, on few threads, with models made on the spot."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The tests of 16-bit arithmetic are small: they run on processors that must emulate it too.
os.environ.setdefault("RAPIDFORMER_EMULATE_16_BIT", "1")
# With more, inductor starts a process that imports torch, and workers in it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests.processes import end_idle_processes
from tests.warm_python import get_warm_python, suit_torch_to_small_models

# xdist's controller imports this file before it starts the workers, and runs no test: fixtures
# import torch and transformers themselves, so that nobody waits for the controller's imports.

# How long an example takes says something about the machine's load, nothing about the code.
settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")

_SLOW_FOLDERS = {"examples", "faults", "parity"}
_SLOW_FIXTURES = {"rapidformer", "start"}
"""They run the command as a user would: in processes of its own, which import torch again."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import slow folders that ``-m "not slow"`` leaves out: that takes seconds too."""
    is_left_out = config.getoption("markexpr") == "not slow"
    return True if is_left_out and collection_path.name in _SLOW_FOLDERS else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``slow`` what ``make check`` leaves out; single files and tests say it themselves."""
    here = Path(__file__).parent
    for item in items:
        is_in_slow_folder = item.path.relative_to(here).parts[0] in _SLOW_FOLDERS
        if is_in_slow_folder or _SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Imports are done: later collections, also in forks, skip their 600,000 objects."""
    gc.freeze()
    gc.enable()  # tests/__init__.py has disabled it


@pytest.fixture(autouse=True, scope="session")
def _suited_to_small_models() -> None:
    import torch

    torch.set_num_threads(1)
    suit_torch_to_small_models()


@pytest.fixture(autouse=True, scope="module")
def _without_garbage_of_others() -> Iterator[None]:
    """Collections look at the objects of one file: over all of them, one takes seconds."""
    yield
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _without_idle_processes() -> Iterator[None]:
    """A file that needs no ranks does not pay for those of the files before it."""
    yield
    end_idle_processes()


@pytest.fixture
def as_the_processor_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bits only if the processor has them, as for users: emulating a whole run takes long."""
    monkeypatch.setenv("RAPIDFORMER_EMULATE_16_BIT", "0")


@pytest.fixture(autouse=True, scope="session")
def _runs_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs without --save must not fill the folder that the tests are started in."""
    os.environ["RAPIDFORMER_RUNS"] = str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test is one process unless it starts others itself."""
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES")
    for name in (*launched, "RAPIDFORMER_FLAGS", "RAPIDFORMER_NODE"):
        # Set first: what a test itself sets is then taken back as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _warnings_of_its_own() -> None:
    """What an earlier test was warned of once is said again."""
    from rapidformer.log import say_once, warn_once

    warn_once.cache_clear()
    say_once.cache_clear()


class Clock:
    """``time.perf_counter``, moved on by the test: how busy the machine is plays no part."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.perf_counter", made)
    return made


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.small import make_model_folder

    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.small import make_pair_data

    return make_pair_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def python() -> Path:
    """A Python for scripts and commands as a user starts them, without the seconds of importing.

    What is about starting itself (what is imported when, who dies with whom) uses the real one.
    """
    return get_warm_python()


@pytest.fixture
def rapidformer(python: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command as a user would, in a folder of the test's own."""

    def run(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", "rapidformer.cli.main", *map(str, words)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **variables},
            timeout=280,
            check=False,
        )

    return run


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command in this process: no seconds of importing, for what needs one process only."""
    from rapidformer.cli.main import main

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["rapidformer"])
        monkeypatch.setattr(sys, "path", list(sys.path))
        capsys.readouterr()
        status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return subprocess.CompletedProcess(list(words), status, captured.out, captured.err)

    return run


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    """A test run that a script has put into the background starts with Ctrl-C ignored.

    So would the processes that it starts.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """pytest's own, whatever earlier tests and their engines did to the library's logger."""
    logger = logging.getLogger("rapidformer")
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False  # as an engine sets it, perhaps in the middle of this test
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(before[0])
    logger.propagate = before[1]
