"""Combinations of switches that only exist with several processes. Parity has its own suite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from rapidformer.engine import RapidformerEngine
from tests.processes import run_in_kept_processes

from .models import make, make_batch

pytestmark = pytest.mark.slow


def train(flags: list[str], dtype: torch.dtype) -> tuple[list[str], dict[str, np.ndarray]]:
    """Two updates over two rows, one row a process; the dtypes and the whole weights."""
    torch.set_num_threads(1)
    engine = RapidformerEngine(
        args=[
            "--lr", "1e-2", "--adam-eps", "1e-3", "--micro-batch-size", "1", "--train-iters", "9",
            "--global-batch-size", "2", "--device", "cpu", "--log-level", "error", *flags,
        ]
    )  # fmt: skip
    model, _, _ = engine.compose(model=make("bert").to(dtype))
    is_alone = engine.mesh is None
    for _ in range(2):
        for row in (0, 1) if is_alone else (engine.args.rank,):
            batch = {name: value[row : row + 1] for name, value in make_batch("bert").items()}
            engine.backward(model(**batch)["loss"])
            engine.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    engine.close()
    # NumPy: torch's own way through a pipe needs the sender to live on.
    arrays = {name: value.numpy() for name, value in weights.items()}
    return sorted({str(p.dtype) for p in model.parameters()}), arrays


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("stage", ["1", "3"])
def test_16_bit_weights_become_fp32_before_they_are_split(stage: str) -> None:
    """Hugging Face loads a bf16 checkpoint as bf16: under ZeRO it must train as without."""
    flags = ["--bf16"]
    ((_, expected),) = run_in_kept_processes(train, 1, flags, torch.bfloat16)
    flags += [f"--zero-{stage}-memory-optimization"]
    dtypes, weights = run_in_kept_processes(train, 2, flags, torch.bfloat16)[0]
    assert dtypes == ["torch.float32"]
    assert_close(weights, expected)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_optimizers_that_work_on_split_weights(optimizer: str) -> None:
    flags = ["--optimizer", optimizer]
    ((_, expected),) = run_in_kept_processes(train, 1, flags, torch.float32)
    flags += ["--zero-3-memory-optimization"]
    _, weights = run_in_kept_processes(train, 2, flags, torch.float32)[0]
    assert_close(weights, expected)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_optimizers_that_need_whole_matrices_say_so(optimizer: str) -> None:
    flags = ["--optimizer", optimizer, "--zero-2-memory-optimization"]
    with pytest.raises(
        AssertionError, match=f"--optimizer {optimizer} cannot be comb.*whole matrices"
    ):
        run_in_kept_processes(train, 2, flags, torch.float32)
