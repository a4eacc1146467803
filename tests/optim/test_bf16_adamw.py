"""AdamW with moments in bf16: the same course as in fp32, half the state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from rapidformer.config import parse_arguments, resolve
from rapidformer.errors import ConfigurationError
from rapidformer.optim.bf16_adamw import Bf16AdamW, round_randomly
from rapidformer.optim.optimizers import build_optimizer, uses_kernel
from rapidformer.verification.settings import Job, change_settings, list_left_out
from tests.training.test_no_waiting import Refusing

STEPS, SIZE = 600, 1000


def train(optimizer: Optimizer, parameter: Tensor, *, first: int = 0, last: int = STEPS) -> None:
    """Gradients of about 0.2 with noise, which become ten times smaller half-way."""
    for number in range(first, last):
        noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(number))
        parameter.grad = ((noise + 0.2) * (1.0 if number < STEPS // 2 else 0.1))[: len(parameter)]
        optimizer.step()


def test_moments_and_weights_follow_fp32() -> None:
    """Rounded to nearest, the mean of squares would never fall."""
    found, expected = nn.Parameter(torch.zeros(SIZE)), nn.Parameter(torch.zeros(SIZE))
    small, plain = Bf16AdamW([found], lr=1e-3), AdamW([expected], lr=1e-3)
    train(small, found)
    train(plain, expected)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.002)
    for name in ("exp_avg", "exp_avg_sq"):
        kept, exact = small.state[found][name], plain.state[expected][name]
        assert kept.dtype == torch.bfloat16
        torch.testing.assert_close(kept.float().mean(), exact.mean(), rtol=0.01, atol=0)


def test_the_kernel_can_be_left_out_and_is_not_named_where_it_cannot_run() -> None:
    model = nn.Linear(2, 2)
    given = ["--lr", "0.1", "--optimizer-state-dtype", "bf16"]
    optimizer = build_optimizer(model, parse_arguments(given))
    assert isinstance(optimizer, Bf16AdamW) and optimizer.may_launch
    assert not uses_kernel(optimizer), "there is none for a CPU"
    without = build_optimizer(model, parse_arguments([*given, "--without", "adamw-kernel"]))
    assert isinstance(without, Bf16AdamW) and not without.may_launch


def test_rounding_is_right_on_average_and_keeps_what_is_not_finite() -> None:
    values = torch.linspace(-2.0, 3.0, 1001)
    rounded = torch.stack(
        [round_randomly(values, torch.tensor(salt, dtype=torch.int32)) for salt in range(500)]
    )
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert len(rounded[:, 7].unique()) == 2
    torch.testing.assert_close(rounded.mean(dim=0), values, rtol=1e-3, atol=1e-6)
    bad = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    bad[0].view(torch.int32).fill_(0x7FFFFFFF)  # a GPU's NaN
    kept = round_randomly(bad, torch.tensor(5, dtype=torch.int32))
    torch.testing.assert_close(kept, bad, equal_nan=True, rtol=0, atol=0)


def test_shards_are_rounded_like_the_whole() -> None:
    whole, shard = nn.Parameter(torch.ones(SIZE)), nn.Parameter(torch.ones(SIZE // 2))
    for parameter in (whole, shard):
        train(Bf16AdamW([parameter], lr=1e-2), parameter, last=20)
    assert torch.equal(whole[: SIZE // 2], shard)


def test_a_step_without_the_kernel_reads_nothing_parameter_by_parameter() -> None:
    """On a GPU, the host would wait for each of them."""
    parameters = [nn.Parameter(torch.ones(SIZE)) for _ in range(2)]
    optimizer = Bf16AdamW(parameters, lr=1e-2)
    for parameter in parameters:
        parameter.grad = torch.ones(SIZE)
    with Refusing():
        optimizer.step()
    assert [float(optimizer.state[each]["step"]) for each in parameters] == [1.0, 1.0]


@pytest.mark.parametrize(("before", "after"), [(AdamW, Bf16AdamW), (Bf16AdamW, AdamW)])
def test_a_run_may_resume_with_the_other_precision(
    before: type[Optimizer], after: type[Optimizer]
) -> None:
    parameter = nn.Parameter(torch.zeros(SIZE))
    first = before([parameter], lr=1e-3)
    train(first, parameter, last=5)
    second = after([parameter], lr=1e-3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for name in ("exp_avg", "exp_avg_sq"):
        kept, exact = second.state[parameter][name], first.state[parameter][name]
        assert kept.dtype == (torch.bfloat16 if after is Bf16AdamW else torch.float32)
        torch.testing.assert_close(kept.float(), exact.float(), rtol=2**-8, atol=0)
    train(second, parameter, first=5, last=6)
    assert parameter.isfinite().all()


def test_verify_leaves_it_out_and_what_cannot_work_is_refused() -> None:
    flags = ["--task", "causal_lm", "--optimizer-state-dtype", "bf16"]
    args = resolve(parse_arguments(flags))
    assert any(
        line.startswith("--optimizer-state-dtype bf16: it r") for line in list_left_out(args)
    )
    job = Job(folder="/nowhere", kind="switched", updates=1, processes=1, is_full_size=True)
    assert change_settings(args, job).optimizer_state_dtype == "fp32"
    with pytest.raises(ConfigurationError, match=r"bf16 needs --optimizer adam"):
        resolve(parse_arguments([*flags, "--optimizer", "sgd"]))
