"""When an update happens: accumulation, order of calls, clipping, and fp16 overflow."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from rapidformer.dist.topology import Topology
from rapidformer.errors import RapidformerError
from rapidformer.optim.gradients import get_divisor, get_norm
from rapidformer.optim.guard import LossScaler
from rapidformer.optim.takeover import repoint_optimizer, take_over_scheduler
from rapidformer.optim.update import UpdateClock

from .rig import Rig


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- accumulation ------------------------------------------------------------------------------


def test_update_happens_after_the_last_micro_batch_only() -> None:
    rig = Rig(rounds=3)
    start = rig.weights
    for number in range(1, 7):
        assert rig.backward(rig.loss()) == (number % 3 == 0)
        rig.optimizer.step()
        rig.scheduler.step()
        rig.optimizer.zero_grad()
        assert rig.clock.updates == number // 3
        assert equal(rig.weights, start) == (number < 3)
        assert rig.lr == 1.0 / (1 + number // 3)


@pytest.mark.parametrize("weight", [0, torch.tensor(0.0)])
def test_an_update_in_which_nothing_counts_has_no_gradient(weight: float | torch.Tensor) -> None:
    rig = Rig(rounds=1)
    rig.backward(rig.loss(), weight=weight)
    assert all(g is not None and not g.any() for g in rig.gradients)


def test_zero_grad_does_not_clear_while_accumulating() -> None:
    rig = Rig(rounds=2)
    rig.backward(rig.loss())
    rig.optimizer.zero_grad()
    assert all(g is not None and g.abs().sum() > 0 for g in rig.gradients)
    rig.backward(rig.loss())
    rig.optimizer.step()
    rig.optimizer.zero_grad()
    assert all(g is None for g in rig.gradients)


def test_zero_grad_at_the_top_of_the_loop_is_as_good() -> None:
    def train(zero_first: bool) -> list[torch.Tensor]:
        rig = Rig(rounds=2)
        for seed in range(4):
            if zero_first:
                rig.optimizer.zero_grad()
            rig.backward(rig.loss(seed=seed))
            rig.optimizer.step()
            if not zero_first:
                rig.optimizer.zero_grad()
        return rig.weights

    assert equal(train(True), train(False))


def test_accumulated_gradient_is_that_of_the_weighted_mean() -> None:
    rig, reference = Rig(rounds=3), Rig()
    rows = [1, 4, 3]
    for seed, count in enumerate(rows):
        rig.backward(rig.loss(count, seed), weight=count)
    inputs = torch.cat(
        [torch.randn(n, 3, generator=torch.Generator().manual_seed(s)) for s, n in enumerate(rows)]
    )
    reference.model(inputs).square().mean().backward()
    for ours, theirs in zip(rig.gradients, reference.gradients, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-8)
    assert rig.clock.total_weight == pytest.approx(8)


def test_one_micro_batch_is_bit_equal_to_plain_torch() -> None:
    rig, plain = Rig(), Rig()
    rig.backward(rig.loss(5), weight=7)
    plain.loss(5).backward()
    assert equal(rig.gradients, plain.gradients)  # type: ignore[arg-type]
    assert rig.clock.total_weight == 7


def test_micro_batch_without_labels_adds_nothing() -> None:
    rig, reference = Rig(rounds=2), Rig()
    rig.backward(rig.loss(2, 1), weight=0)
    rig.backward(rig.loss(2, 2), weight=2)
    reference.loss(2, 2).backward()
    for ours, theirs in zip(rig.gradients, reference.gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)  # type: ignore[arg-type]


def test_epoch_end_closes_an_update_early() -> None:
    rig = Rig(rounds=4)
    assert not rig.backward(rig.loss(2, 1))
    assert rig.backward(rig.loss(2, 2), ends_update=True)
    rig.optimizer.step()
    assert rig.clock.updates == 1
    # and the next update has its full number of micro-batches again
    assert [rig.backward(rig.loss()) for _ in range(4)] == [False, False, False, True]


def test_accumulation_may_be_decided_by_hand() -> None:
    clock = UpdateClock(1, Topology())
    clock.forced = False
    assert not clock.start_micro_batch(ends_update=True)
    clock.forced = True
    assert clock.start_micro_batch(ends_update=False)


# ---- order of calls ----------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2])
def test_either_order_of_the_two_steps_gives_the_same_rates_and_weights(rounds: int) -> None:
    def train(scheduler_first: bool) -> tuple[list[float], list[torch.Tensor]]:
        rig, rates = Rig(rounds), []
        for seed in range(3 * rounds):
            rig.backward(rig.loss(seed=seed))
            if scheduler_first:
                rig.scheduler.step()
                rates.append(rig.lr)
                rig.optimizer.step()
            else:
                rates.append(rig.lr)
                rig.optimizer.step()
                rig.scheduler.step()
            rig.optimizer.zero_grad()
        return [*rates, rig.lr], rig.weights

    first, second = train(True), train(False)
    assert first[0] == second[0]
    assert equal(first[1], second[1])
    assert first[0][-1] == 0.25


def test_no_warning_about_the_order() -> None:
    rig = Rig()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            rig.backward(rig.loss())
            rig.scheduler.step()
            rig.optimizer.step()


def test_step_without_backward_is_an_error() -> None:
    rig = Rig()
    rig.loss().backward()  # the user's own backward: the engine knows nothing of it
    with pytest.raises(RapidformerError, match=r"call engine.backward\(loss\) instead of"):
        rig.optimizer.step()


def test_second_step_for_one_gradient_is_an_error() -> None:
    rig = Rig()
    rig.backward(rig.loss())
    rig.optimizer.step()
    with pytest.raises(RapidformerError, match="without a gradient"):
        rig.optimizer.step()


def test_forgotten_step_is_an_error() -> None:
    rig = Rig(rounds=2)
    rig.backward(rig.loss())
    rig.backward(rig.loss())
    with pytest.raises(RapidformerError, match=r"optimizer.step\(\) was not called"):
        rig.backward(rig.loss())


def test_a_closure_may_only_return_the_loss() -> None:
    rig, expected = Rig(), Rig()
    for each in (rig, expected):
        each.backward(each.loss())
    assert rig.optimizer.step(lambda: 0.5) == 0.5
    expected.optimizer.step()
    assert equal(rig.weights, expected.weights)
    with pytest.raises(RapidformerError, match="without a gradient"):
        rig.optimizer.step(lambda: 0.5)


def test_optimizer_and_scheduler_keep_their_identity() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=1.0)
    rig = Rig(optimizer=lambda _: optimizer)
    assert rig.optimizer is optimizer
    assert isinstance(rig.optimizer, torch.optim.AdamW)
    assert type(rig.optimizer).__name__ == "AdamW"
    assert isinstance(rig.scheduler, torch.optim.lr_scheduler.LambdaLR)


def test_optimizer_made_before_its_scheduler_and_after() -> None:
    """A scheduler patches `step` of its optimizer: taken over before or after, both must work."""
    rig = Rig()
    late = take_over_scheduler(
        torch.optim.lr_scheduler.StepLR(rig.optimizer, step_size=1, gamma=0.5), rig.clock
    )
    rig.backward(rig.loss())
    rig.optimizer.step()
    late.step()
    assert rig.clock.updates == 1
    assert rig.lr == pytest.approx(0.5)


def test_before_the_first_gradient_a_schedule_moves_as_in_a_plain_loop() -> None:
    rig = Rig()
    rig.scheduler.step()
    assert rig.lr == pytest.approx(1 / 2)
    rig.backward(rig.loss())
    rig.optimizer.step()
    rig.scheduler.step()
    assert rig.lr == pytest.approx(1 / 3)


def test_bypass_lets_checkpoint_code_step() -> None:
    rig = Rig()
    rig.loss().backward()
    start = rig.weights
    rig.clock.is_bypassed = True
    rig.optimizer.step()
    rig.clock.is_bypassed = False
    assert not equal(rig.weights, start)
    assert rig.clock.updates == 0


# ---- clipping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [1e-3, 0.1, 1.0, 1e6])
def test_clipping_is_torchs_bit_for_bit(max_norm: float) -> None:
    ours, theirs = Rig(), Rig()
    ours.backward(ours.loss())
    theirs.loss().backward()
    norm = nn.utils.clip_grad_norm_(theirs.model.parameters(), max_norm)
    found = ours.clock.clip(max_norm)
    assert found is not None
    assert torch.equal(found, norm)
    assert equal(ours.gradients, theirs.gradients)  # type: ignore[arg-type]


def test_step_clips_on_its_own_unless_it_was_done() -> None:
    def train(clip_by_hand: float | None) -> list[torch.Tensor]:
        rig = Rig(clip_grad=0.01)
        rig.backward(rig.loss())
        if clip_by_hand is not None:
            rig.clock.clip(clip_by_hand)
        rig.optimizer.step()
        return rig.weights

    plain = Rig()
    plain.loss().backward()
    nn.utils.clip_grad_norm_(plain.model.parameters(), 0.01)
    expected = [p.detach() - p.grad for p in plain.model.parameters()]  # type: ignore[operator]
    assert equal(train(None), expected)
    assert equal(train(0.01), expected)
    assert not equal(train(1e6), expected), "clipped by hand: not once more"


def test_clip_of_zero_means_off_and_still_tells_the_norm() -> None:
    rig = Rig()
    rig.backward(rig.loss())
    before = [g.clone() for g in rig.gradients]  # type: ignore[union-attr]
    norm = rig.clock.clip(0.0)
    assert norm is not None
    assert norm > 0
    assert equal(rig.gradients, before)  # type: ignore[arg-type]
    assert get_divisor(torch.tensor(torch.inf), 0.0) == 1.0


def test_nothing_is_clipped_while_accumulating() -> None:
    rig = Rig(rounds=2)
    rig.backward(rig.loss())
    assert rig.clock.clip(1.0) is None


# ---- fp16 --------------------------------------------------------------------------------------


def overflow(rig: Rig) -> None:
    """One update whose gradient is not finite, in the seeds' order of calls."""
    rig.backward(rig.loss() * float("inf"))
    rig.scheduler.step()
    rig.optimizer.step()
    rig.optimizer.zero_grad()


def test_overflow_skips_the_update_and_the_schedule_and_halves_after_hysteresis() -> None:
    rig = Rig(scaler=LossScaler(initial=1024, hysteresis=2, window=1000))
    assert rig.scaler is not None
    start = rig.weights
    overflow(rig)
    assert (rig.clock.updates, rig.clock.skipped, rig.scaler.scale, rig.lr) == (0, 1, 1024, 1.0)
    overflow(rig)
    assert (rig.clock.updates, rig.clock.skipped, rig.scaler.scale, rig.lr) == (0, 2, 512, 1.0)
    assert equal(rig.weights, start)
    rig.backward(rig.loss())
    rig.optimizer.step()
    rig.scheduler.step()
    rig.optimizer.zero_grad()
    assert (rig.clock.updates, rig.lr) == (1, 0.5)
    assert not equal(rig.weights, start)


def test_schedule_called_after_a_skipped_update_does_not_advance() -> None:
    rig = Rig(scaler=LossScaler(initial=8))
    rig.backward(rig.loss() * float("nan"))
    rig.optimizer.step()
    rig.scheduler.step()
    assert rig.lr == 1.0


def test_nan_in_one_micro_batch_of_several_skips_the_update() -> None:
    rig = Rig(rounds=2, scaler=LossScaler(initial=8))
    rig.backward(rig.loss() * float("nan"))
    rig.optimizer.step()
    rig.backward(rig.loss())
    rig.optimizer.step()
    assert (rig.clock.updates, rig.clock.skipped) == (0, 1)


@pytest.mark.parametrize("rounds", [1, 2])
def test_scaling_does_not_change_the_gradient(rounds: int) -> None:
    scaled, plain = Rig(rounds, scaler=LossScaler(initial=2.0**16)), Rig(rounds)
    for seed in range(rounds):
        scaled.backward(scaled.loss(3, seed), weight=3)
        plain.backward(plain.loss(3, seed), weight=3)
    # A power of two: exact.
    assert equal(scaled.gradients, plain.gradients)  # type: ignore[arg-type]


# ---- pointing an optimizer to new parameters ---------------------------------------------------


def test_repointing_by_name() -> None:
    model = nn.Linear(2, 2)
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight = nn.Parameter(torch.ones(2, 2))
    repoint_optimizer(optimizer, model, names)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(model.weight),
        id(model.bias),
    ]


def test_optimizer_of_another_model_is_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    names = {id(p): name for name, p in model.named_parameters()}
    with pytest.raises(RapidformerError, match="holds 2 parameters not in the model"):
        repoint_optimizer(torch.optim.SGD(other.parameters(), lr=1.0), model, names)


def test_optimizer_with_state_is_refused_only_where_parameters_were_replaced() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = {id(p): name for name, p in model.named_parameters()}
    repoint_optimizer(optimizer, model, names)
    model.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(RapidformerError, match=r"Compose first.*\n.*engine.compose"):
        repoint_optimizer(optimizer, model, names)


def test_the_norm_of_a_large_gradient_is_exact() -> None:
    """torch's own, on a CPU, adds millions of squares up in fp32 and loses a part."""
    gradient = torch.randn(4000, 1000, generator=torch.Generator().manual_seed(1))
    small = torch.ones(3)
    expected = (gradient.double().square().sum() + 3.0).sqrt()
    assert abs(float(get_norm([gradient, small])) / float(expected) - 1) < 1e-7
    assert float(get_norm([small])) == float(torch.nn.utils.get_total_norm([small]))


# ---- clipping inside the optimizer's step --------------------------------------------------------


def train_clipped(
    optimizer: Callable[..., Optimizer], *, clips_in_step: bool, max_norm: float = 0.1
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    rig = Rig(optimizer=optimizer, clip_grad=max_norm, clips_in_step=clips_in_step)
    for seed in range(3):
        rig.optimizer.zero_grad()
        rig.backward(rig.loss(seed=seed))
        rig.optimizer.step()
    return rig.weights, rig.gradients


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(AdamW, lr=0.1, fused=True),
        functools.partial(SGD, lr=0.1, momentum=0.9, fused=True),
    ],
)
def test_clipping_inside_the_step_gives_the_same_up_to_rounding(
    optimizer: Callable[..., Optimizer],
) -> None:
    expected = train_clipped(optimizer, clips_in_step=False)
    found = train_clipped(optimizer, clips_in_step=True)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    # Far below the limit, nothing is divided.
    unclipped = [train_clipped(optimizer, clips_in_step=c, max_norm=1e6)[0] for c in (True, False)]
    assert equal(*unclipped)


def test_a_hook_before_the_step_sees_the_clipped_gradient() -> None:
    rig = Rig(optimizer=functools.partial(SGD, lr=0.1, fused=True), clip_grad=0.1,
              clips_in_step=True)  # fmt: skip
    norms: list[float] = []
    rig.optimizer.register_step_pre_hook(
        lambda *_: norms.append(float(get_norm([g for g in rig.gradients if g is not None])))
    )
    rig.backward(rig.loss() * 1000)
    rig.optimizer.step()
    assert norms == [pytest.approx(0.1, rel=1e-4)]


def test_what_is_not_fused_is_clipped_before_the_step() -> None:
    plain = functools.partial(SGD, lr=0.1)
    expected, found = (train_clipped(plain, clips_in_step=c)[0] for c in (False, True))
    assert equal(found, expected)
