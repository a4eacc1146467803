"""What belongs to the whole process is as it was: after an import, and after an engine's life.

Environment, warning filters, torch's flags, levels of loggers, and what ``compat/patches.py``
replaces in other libraries. Seeding is not meant: that is what ``--seed`` asks for.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_in_processes

# What stays changed, with the reason.
ALLOWED = {
    "logger rapidformer": "it is ours, and shows messages as --log-level says",
}
DETERMINISTIC = {
    "environ CUBLAS_WORKSPACE_CONFIG": "cuBLAS reads it when it starts, which cannot be undone",
    "torch deterministic": "--deterministic promises equal results for whatever follows, too",
}

# Tested where code is generated (tests/accel/test_compile.py).
COMPILED = {"environ _TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR": "torch's own, for its compiled code"}


def look() -> dict[str, Any]:
    """Every fact that others in the process may rely on."""
    facts: dict[str, Any] = {"warnings": [str(each) for each in warnings.filters]}
    facts |= {f"environ {name}": value for name, value in os.environ.items()}
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    # One that nobody had asked for yet has no level of its own.
    loggers = [each for each in loggers if isinstance(each, logging.Logger) and each.level]
    return facts | {f"logger {logger.name}": logger.level for logger in loggers}


def look_at_torch() -> dict[str, Any]:
    import torch

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "torch dtype": torch.get_default_dtype(),
        "torch deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch tf32": (torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark),
        "torch sdp": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "torch modes": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
    }  # fmt: skip


def list_changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = [name for name in before | after if before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names]


def find_patches() -> list[str]:
    """What is still replaced in other libraries."""
    from rapidformer.compat.patches import Change, Patch

    gc.disable()  # this process ends, and the next line makes each collection a second longer
    gc.unfreeze()  # what was there before this process forked is looked at, too
    kinds = {Change, *Change.__subclasses__()}
    assert not any(kind.__subclasses__() for kind in kinds - {Change}), "they would be left out"
    # Not isinstance, which asks the object: some are proxies of what is gone.
    changes = [each for each in gc.get_objects() if type(each) in kinds]
    assert changes
    left = [f"{change} is still made" for change in changes if change.is_made]
    for patch in (each for each in changes if isinstance(each, Patch)):
        for (table, name, _), (_, ours) in zip(patch._entries, patch._built, strict=True):
            if table.get(name) is ours:
                left.append(f"{name} is still replaced")
    return left


def train_each(cases: list[dict[str, Any]]) -> tuple[list[list[str]], list[str]]:
    """What each case has changed, and what any of them has left replaced."""
    return [train(settings) for settings in cases], find_patches()


def train(settings: dict[str, Any]) -> list[str]:
    """Compose, make two updates, close; returns what has changed.

    Compiled blocks call operators as they are: generating code for them would take much longer.
    """
    import torch._inductor.config

    from rapidformer import RapidformerEngine
    from tests.accel.models import get_loss, make

    before = look() | look_at_torch()
    engine = RapidformerEngine(args={"lr": 0.1, "device": "cpu", **settings})
    model, optimizer, *_ = engine.compose(model=make("gpt2"))
    with torch._inductor.config.patch(fallback_by_default=True):
        for _ in range(2):
            engine.backward(get_loss(model, "gpt2"))
            optimizer.step()
            optimizer.zero_grad()
    engine.close()
    return list_changes(before, look() | look_at_torch())


# Cases of a process follow each other: what one of them changes is listed as its own.
@pytest.mark.parametrize(
    ("cases", "ranks"),
    [
        (
            [
                {},
                {"bf16": True, "checkpoint_activations": True, "lora_rank": 2},
                {"deterministic": True},
            ],
            1,
        ),
        (
            [
                {"zero_3_memory_optimization": True},
                {"tensor_model_parallel_size": 2},
                {"context_parallel_size": 2},
            ],
            2,
        ),
        pytest.param([{"compile": True, "compile_backend": "inductor"}], 1, marks=pytest.mark.slow),
    ],
    ids=["one process", "two processes", "compiled"],
)
def test_an_engine_leaves_the_process_as_it_was(cases: list[dict[str, Any]], ranks: int) -> None:
    for found, patches in run_in_processes(train_each, ranks, cases):
        assert not patches
        for settings, changes in zip(cases, found, strict=True):
            allowed = (*ALLOWED, *(DETERMINISTIC if "deterministic" in settings else ()))
            assert not [each for each in changes if not each.startswith(allowed)], settings


def test_importing_changes_nothing() -> None:
    code = (
        "from tests.test_process_state import list_changes, look\n"
        "before = look()\n"
        "import rapidformer, rapidformer.config, rapidformer.cli.main\n"
        "changes = list_changes(before, look())\n"
        "assert not changes, changes\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
