"""Merged linear layers on a GPU: gradients as close to exact ones as before, or closer."""

from __future__ import annotations

import pytest
import torch

from tests.accel.test_merged_linears import (
    ROWS,
    Block,
    compile_merged,
    differentiate,
    measure_errors,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_at_least_as_close_to_exact_ones_as_those_of_autocast(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    model = Block().cuda()
    rows = ROWS.cuda()
    exact = differentiate(model.double(), model, rows.double())
    model.float()
    compiled, products = compile_merged(model)
    with torch.autocast("cuda", dtype=dtype):
        plain = measure_errors(differentiate(model, model, rows), exact)
        merged = measure_errors(differentiate(model, compiled, rows), exact)
    assert len(products) == 4
    assert sum(merged) <= sum(plain)
