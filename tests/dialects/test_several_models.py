"""Several trained models in one Accelerator, each with its optimizer: beside a bare loop."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from rapidformer import Accelerator, DeepSpeedPlugin
from rapidformer.errors import CheckpointError, RapidformerError
from tests.processes import run_in_kept_processes

ROWS = 22
"""The last batch is smaller."""
Play = tuple[list[float], list[float]]


def make_players(batch_size: int, rows: int = ROWS) -> Any:
    torch.manual_seed(0)
    judge = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    maker = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    inputs = torch.rand(rows, 3)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1).gt(1.5).long()), batch_size=batch_size)
    optimizers = torch.optim.AdamW(judge.parameters(), 0.05), torch.optim.SGD(maker.parameters(), 1)
    schedulers = StepLR(optimizers[0], 2, 0.5), StepLR(optimizers[1], 2, 0.5)
    return judge, maker, *optimizers, *schedulers, loader


def get_weights(*models: nn.Module) -> list[float]:
    weights = [p for model in models for p in model.parameters()]
    whole: list[Any] = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in weights]
    return [float(value) for p in whole for value in p.detach().flatten()]


def play(
    accelerator: Accelerator | None, *, steps: int = 1, rows: int = ROWS, folder: Any = None
) -> Play:
    """Two models that train against each other; returns their weights, and the norms clipped."""
    parts = make_players(4, rows)
    if accelerator is not None:
        *parts, judge_schedule, maker_schedule = accelerator.prepare(
            *parts[:4], parts[6], *parts[4:6]
        )
        parts = [*parts[:4], judge_schedule, maker_schedule, parts[4]]
    judge, maker, judge_optimizer, maker_optimizer, judge_schedule, maker_schedule, loader = parts
    norms = []
    for epoch in range(3):
        if folder is not None and epoch == 2:  # go on as if from the start of the second epoch
            assert accelerator is not None
            accelerator.load_state(folder)
        for number, (inputs, targets) in enumerate(loader, 1):
            is_last = number % steps == 0 or number == len(loader)
            divisor = steps if accelerator is None else 1
            together = (
                nullcontext() if accelerator is None else accelerator.accumulate(judge, maker)
            )
            backward: Any = torch.Tensor.backward if accelerator is None else accelerator.backward
            with together:
                backward(cross_entropy(judge(maker(inputs).detach()), targets) / divisor)
                if accelerator is not None or is_last:
                    judge_optimizer.step()
                    judge_optimizer.zero_grad()
                if steps > 1:
                    judge.requires_grad_(False)
                backward(-cross_entropy(judge(maker(inputs)), targets) / divisor)
                judge.requires_grad_(True)
                if accelerator is None and is_last:
                    norms.append(nn.utils.clip_grad_norm_(maker.parameters(), 0.1))
                if accelerator is not None and accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(maker.parameters(), 0.1))
                if accelerator is not None or is_last:
                    maker_optimizer.step()
                    maker_optimizer.zero_grad()
                if steps == 1 and number % 2:
                    judge_optimizer.zero_grad()  # the maker's loss has reached the judge, too
        judge_schedule.step()
        maker_schedule.step()
        if folder is not None and epoch == 0:
            assert accelerator is not None
            accelerator.save_state(folder)
    return get_weights(judge, maker), [float(norm) for norm in norms]


def test_a_judge_and_a_maker_are_a_bare_loop() -> None:
    weights, norms = play(Accelerator(cpu=True))
    expected_weights, expected_norms = play(None)
    assert weights == pytest.approx(expected_weights, abs=1e-7)
    assert norms == pytest.approx(expected_norms, rel=1e-6)


def test_accumulation_over_equal_batches_is_a_bare_loop() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    found, expected = play(accelerator, steps=2, rows=24), play(None, steps=2, rows=24)
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-5)


def test_a_pass_that_fails_leaves_the_gradients_of_earlier_ones() -> None:
    """As in a loop that catches an error of exhausted memory, and tries a smaller batch."""

    def train(accelerator: Accelerator | None) -> list[float]:
        judge, maker, *optimizers = make_players(4)[:4]
        if accelerator is not None:
            judge, maker, *optimizers = accelerator.prepare(judge, maker, *optimizers)
        backward: Any = torch.Tensor.backward if accelerator is None else accelerator.backward
        inputs = torch.linspace(0, 1, 12).view(4, 3)
        losses = [judge(maker(scale * inputs)).square().mean() for scale in (1, 2)]
        backward(losses[0])
        if accelerator is not None:
            with pytest.raises(MemoryError):
                backward(Failing.apply(losses[1]))
        backward(losses[1])
        for optimizer in optimizers:
            optimizer.step()
        return get_weights(judge, maker)

    assert train(Accelerator(cpu=True)) == pytest.approx(train(None), abs=1e-7)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise MemoryError


def _play_in_two_processes(folder: str) -> list[Play]:
    """Split batches: a prepared scheduler then moves as often as in one process."""
    plugin = DeepSpeedPlugin(zero_stage=3)

    def make(**arguments: Any) -> Accelerator:
        return Accelerator(cpu=True, split_batches=True, **arguments)

    return [
        play(make()), play(make(deepspeed_plugin=plugin)),
        play(make(gradient_accumulation_steps=2), steps=2), play(make(), folder=folder),
    ]  # fmt: skip


def test_two_processes_are_as_one(tmp_path: Path) -> None:
    one = tmp_path / "one"
    alone = [
        play(None), play(None), play(Accelerator(cpu=True, gradient_accumulation_steps=2), steps=2),
        play(Accelerator(cpu=True), folder=one),
    ]  # fmt: skip
    for found in run_in_kept_processes(_play_in_two_processes, 2, str(tmp_path / "two")):
        for (weights, norms), (expected, expected_norms) in zip(found, alone, strict=True):
            assert weights == pytest.approx(expected, abs=1e-5)
            assert norms == pytest.approx(expected_norms, rel=1e-4)


def test_a_loss_of_both_is_clipped_over_any_parameters() -> None:
    """An encoder and a decoder: one loss, two optimizers."""
    accelerator = Accelerator(cpu=True)
    norms = []
    for backward in (torch.Tensor.backward, accelerator.backward):
        _, maker, _, optimizer, *_ = make_players(4)
        head = nn.Linear(3, 1)
        nn.init.ones_(head.weight)
        chosen: list[Any] = [*maker[2].parameters(), *head.parameters()]
        if norms:
            accelerator.prepare(maker, optimizer)
            accelerator.prepare(torch.optim.SGD(head.parameters(), lr=0.1), head)
        backward(mse_loss(head(maker(torch.ones(2, 3))), torch.full((2, 1), 5.0)))
        clip: Any = accelerator.clip_grad_norm_ if norms else nn.utils.clip_grad_norm_
        norms.append([float(clip(each, 1e-3)) for each in (chosen, maker[0].weight, chosen)])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_state_of_other_models_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    judge, _, optimizer, *_ = accelerator.prepare(*make_players(4)[:4])
    accelerator.backward(judge(torch.ones(1, 3)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path)
    alone = Accelerator(cpu=True)
    alone.prepare(*make_players(4)[:3:2])
    with pytest.raises(CheckpointError, match="with 2 trained models, and there are 1 now"):
        alone.load_state(tmp_path)


def test_what_cannot_be_trained_together_is_refused() -> None:
    def prepare(*objects: Any, **arguments: Any) -> Accelerator:
        accelerator = Accelerator(cpu=True, **arguments)
        accelerator.prepare(*objects)
        return accelerator

    judge, maker, judge_optimizer, maker_optimizer, *_ = make_players(4)
    both = torch.optim.SGD([*judge.parameters(), *maker.parameters()], lr=0.1)
    with pytest.raises(RapidformerError, match="holds parameters of 2: put them into one"):
        prepare(judge, maker, both)
    judge, maker, judge_optimizer, maker_optimizer, *_ = make_players(4)
    with pytest.raises(RapidformerError, match="two optimizers train Sequential: make one"):
        prepare(judge, judge_optimizer, torch.optim.SGD(judge.parameters(), lr=0.1))
    judge, maker, judge_optimizer, maker_optimizer, *_ = make_players(4)
    with pytest.raises(RapidformerError, match="an optimizer was prepared without the model"):
        prepare(judge, judge_optimizer, maker_optimizer).backward(judge(torch.ones(1, 3)).sum())
    with pytest.raises(RapidformerError, match='several models with mixed_precision="fp16"'):
        prepare(*make_players(4)[:4], mixed_precision="fp16")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    judge, *_, loader = accelerator.prepare(*make_players(4)[:4], make_players(4)[6])
    for inputs, _ in loader:
        with (
            pytest.raises(RapidformerError, match=r"second loss of this micro-batch .* Sequential"),
            accelerator.accumulate(judge),
        ):
            accelerator.backward(judge(inputs).sum())
            accelerator.backward(judge(inputs).sum())
        break
