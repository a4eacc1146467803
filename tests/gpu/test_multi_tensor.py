"""AdamW and the gradient's norm in a few launches, against torch's own and fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from rapidformer.optim.bf16_adamw import Bf16AdamW
from rapidformer.optim.multi_tensor.adamw import MultiTensorAdamW
from rapidformer.optim.multi_tensor.norm import sum_squares

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SHAPES = [(1,), (0,), (64, 48), (33, 7), (9000,), (3, 5, 7), (768, 300)]


def build_tensors(dtype: torch.dtype) -> list[Tensor]:
    """Odd sizes, an empty tensor, and views whose addresses are not multiples of 16."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in SHAPES]
    return [*tensors, *(torch.randn(n + 1, device="cuda").to(dtype)[1:] for n in (5000, 4096))]


def build(cls: type[AdamW], tensors: list[Tensor]) -> tuple[list[nn.Parameter], AdamW]:
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    groups: list[dict[str, Any]] = [
        {"params": parameters[:4], "weight_decay": 0.1},
        {"params": parameters[4:], "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.95)},
    ]
    return parameters, cls(groups, lr=1e-2, fused=True)


def give_gradients(*lists: list[nn.Parameter]) -> None:
    for parameters in zip(*lists, strict=True):
        gradient = torch.randn_like(parameters[0])
        for parameter in parameters:
            parameter.grad = gradient.to(parameter.dtype, copy=True)


def assert_same(mine: AdamW, theirs: AdamW, **tolerance: float) -> None:
    pairs = zip(list_parameters(mine), list_parameters(theirs), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, **tolerance)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            kept, exact = mine.state[found][name], theirs.state[expected][name]
            torch.testing.assert_close(kept, exact, **tolerance)


def list_parameters(optimizer: AdamW) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)],
)
def test_steps_match_torch(dtype: torch.dtype, tolerance: float) -> None:
    """With a divisor and a skipped step, from the first step on."""
    tensors = build_tensors(dtype)
    mine, ours = build(MultiTensorAdamW, [tensor.clone() for tensor in tensors])
    theirs, torchs = build(AdamW, tensors)
    numbers = {1: (2.5, 0.0), 2: (1.0, 1.0), 4: (7.0, 0.0)}
    for step in range(6):
        give_gradients(mine, theirs)
        for optimizer in (ours, torchs):
            if step in numbers:
                divisor, flag = (torch.tensor(number, device="cuda") for number in numbers[step])
                optimizer.grad_scale, optimizer.found_inf = divisor, flag  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.__dict__.pop("grad_scale", None)
            optimizer.__dict__.pop("found_inf", None)
        ours.param_groups[0]["lr"] = torchs.param_groups[0]["lr"] = 1e-2 / (step + 1)
    assert isinstance(ours, MultiTensorAdamW)
    assert ours.find_launch() is not None
    assert_same(ours, torchs, rtol=tolerance, atol=tolerance)


def test_the_default_device_may_be_the_gpu() -> None:
    with torch.device("cuda"):
        mine, ours = build(MultiTensorAdamW, build_tensors(torch.float32))
        theirs, torchs = build(AdamW, build_tensors(torch.float32))
        give_gradients(mine, theirs)
        assert float(sum_squares([p.grad for p in mine if p.grad is not None])) > 0
        ours.step()
        torchs.step()
    assert_same(ours, torchs, rtol=2e-6, atol=2e-6)


def test_unaligned_tensors_keep_their_neighbours() -> None:
    memory = torch.ones(4, 40, device="cuda")
    weight = nn.Parameter(memory[0, 3:30])
    optimizer = MultiTensorAdamW([weight], lr=0.5, fused=True)
    weight.grad = memory[1, 5:32]
    state = optimizer.get_state(weight)
    state["exp_avg"], state["exp_avg_sq"] = memory[2, 1:28], memory[3, 7:34]
    optimizer.step()
    changed = (memory != 1).sum(dim=1).tolist()
    assert changed == [27, 0, 0, 0]  # means of ones stay ones
    assert bool((memory[0, 3:30] != 1).all())


def test_as_exact_as_torch_against_fp64() -> None:
    tensors = build_tensors(torch.float32)
    exact, reference = build(AdamW, [tensor.double() for tensor in tensors])
    mine, ours = build(MultiTensorAdamW, tensors)
    for _ in range(20):
        give_gradients(exact, mine)
        for parameter, twin in zip(exact, mine, strict=True):
            assert twin.grad is not None
            parameter.grad = twin.grad.double()
        ours.step()
        reference.step()
    for found, expected in zip(mine, exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_moments_in_bf16_follow_fp32_and_are_rounded_at_random() -> None:
    torch.manual_seed(0)
    start = torch.randn(20000, device="cuda")
    found, expected = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    small, plain = Bf16AdamW([found], lr=1e-3), AdamW([expected], lr=1e-3, fused=True)
    for step in range(50):
        found.grad = torch.randn_like(start) + 0.2
        expected.grad = found.grad.clone()
        small.step()
        plain.step()
        for name in ("exp_avg", "exp_avg_sq"):
            kept, exact = small.state[found][name], plain.state[expected][name]
            assert kept.dtype == torch.bfloat16
            torch.testing.assert_close(kept.float().mean(), exact.mean(), rtol=0.01, atol=0)
            if step == 0:
                torch.testing.assert_close(kept.float(), exact, rtol=2**-7, atol=0)
                # Right on average: a quarter are not the nearest.
                assert 0.2 < (kept != exact.bfloat16()).float().mean() < 0.3
    assert small.find_launch() is not None
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.002)


def test_gradients_of_another_dtype() -> None:
    start = torch.randn(5000, device="cuda")
    found, expected = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours, torchs = MultiTensorAdamW([found], fused=True), AdamW([expected], fused=True)
    gradient = torch.randn(5000, device="cuda").bfloat16()
    found.grad, expected.grad = torch.zeros_like(found), gradient.float()
    launch = ours._build_launch([found], [torch.bfloat16])
    assert launch is not None
    assert launch.prepare()
    launch.run(gradients=[gradient])
    torchs.step()
    assert_same(ours, torchs, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("classes", [(AdamW, MultiTensorAdamW), (MultiTensorAdamW, AdamW)])
@pytest.mark.parametrize("is_fused", [True, False])
def test_a_run_resumes_with_the_other_class(classes: Any, is_fused: bool) -> None:
    tensors = build_tensors(torch.float32)
    theirs, torchs = build(AdamW, [tensor.clone() for tensor in tensors])
    first, before = build(classes[0], tensors)
    if not is_fused and classes[0] is AdamW:
        for group in before.param_groups:
            group["fused"] = False
    torch.manual_seed(1)
    give_gradients(first, theirs)
    before.step()
    torchs.step()
    second, after = build(classes[1], [p.detach().clone() for p in first])
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    for _ in range(2):
        give_gradients(second, theirs)
        after.step()
        torchs.step()
    if classes[1] is MultiTensorAdamW:
        assert after.find_launch() is not None
    # torch's unfused AdamW has an exact 1 - beta2, where fused ones round beta2 to fp32 first.
    assert_same(after, torchs, rtol=2e-5, atol=1e-6)


def test_a_cuda_graph_replays_the_update() -> None:
    """Rates and gradients may change between replays, and the step counts on the device."""
    tensors = build_tensors(torch.float32)
    mine, ours = build(MultiTensorAdamW, [tensor.clone() for tensor in tensors])
    theirs, torchs = build(AdamW, tensors)
    assert isinstance(ours, MultiTensorAdamW)
    divisor = torch.tensor(2.0, device="cuda")
    give_gradients(mine, theirs)
    gradients = [p.grad for p in mine if p.grad is not None]
    sum_squares(gradients)
    launch = ours.find_launch()
    assert launch is not None
    assert launch.prepare()
    launch.run(divisor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = sum_squares(gradients)
        launch.run(divisor)
    assert total is not None
    torchs.grad_scale = divisor  # type: ignore[attr-defined]
    torchs.step()
    for step in range(3):
        for found, expected in zip(mine, theirs, strict=True):
            assert found.grad is not None
            expected.grad = found.grad.normal_().clone()
        ours.param_groups[0]["lr"] = torchs.param_groups[0]["lr"] = 1e-2 / (step + 1)
        assert launch.prepare()
        graph.replay()
        torchs.step()
        exact = sum(gradient.double().square().sum() for gradient in gradients)
        torch.testing.assert_close(total, exact, rtol=1e-6, atol=0)
    assert_same(ours, torchs, rtol=2e-6, atol=2e-6)


def test_the_sum_of_squares_is_exact_and_the_same_every_time() -> None:
    tensors = [*build_tensors(torch.float32), *build_tensors(torch.bfloat16)]
    tensors.append(torch.randn(300_000, device="cuda")[:200_001])
    found = sum_squares(tensors)
    assert found is not None
    exact = sum(tensor.double().square().sum() for tensor in tensors)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)
    assert all(torch.equal(found, sum_squares(tensors)) for _ in range(3))  # type: ignore[arg-type]
    for number, check in ((torch.inf, torch.isinf), (torch.nan, torch.isnan)):
        tensors[3][0, 0] = number
        assert bool(check(sum_squares(tensors)))
