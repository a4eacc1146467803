"""``--on-bad-loss``: a batch whose loss is NaN, infinite or a spike stops, is skipped or undone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer import Finetuner, RapidformerEngine
from rapidformer.checkpoint.finding import find_checkpoints
from rapidformer.compat.torch_optimizers import obeys_flags, step_unless
from rapidformer.config import parse_arguments
from rapidformer.config.validate import find_problems
from rapidformer.engine.unused_settings import find_idle_settings
from rapidformer.errors import TrainingError
from rapidformer.optim.guard import LEAST, RecentValues
from rapidformer.training.bad_batches import find_first_bad
from rapidformer.training.meter import Measurement
from tests.processes import run_in_kept_processes
from tests.training.test_templates import read_lines

NAN, INF = float("nan"), float("inf")
BAD = 10
"""The sample that makes a loss bad: with batches of 4 in order, it is in the third one."""


class Model(nn.Module):
    """A linear layer behind a batch norm, whose statistics a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ((self.layer(self.norm(x)).squeeze(-1) - labels) ** 2).mean()


class Trainer(Finetuner):
    """Takes its samples in order; the bad one's inputs are replaced."""

    is_shuffled = False
    bad_value = NAN
    left_out: tuple[int, ...] = ()
    samples = 40

    def train_valid_test_datasets_provider(self) -> Any:
        inputs = torch.rand(self.samples, 2, generator=torch.Generator().manual_seed(0))
        rows = [{"x": x, "labels": 3 * x.sum() - 1} for x in inputs]
        rows[BAD] = {"x": inputs[BAD], "labels": torch.tensor(self.bad_value)}
        kept = [row for number, row in enumerate(rows) if number not in self.left_out]
        return kept, None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        torch.manual_seed(1)
        return Model(), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        return model(**batch)


class WithoutTheBatch(Trainer):
    left_out = (8, 9, 10, 11)


def train(kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    values = {
        "micro_batch_size": 2, "global_batch_size": 4, "lr": 0.05, "log_level": "error",
        "save": "none", "epochs": 1, "lr_decay_iters": 20, "log_interval": 3,
    }  # fmt: skip
    trainer = kind(RapidformerEngine(args={**values, **settings}))
    trainer.train()
    return trainer


def get_state(trainer: Trainer) -> dict[str, Any]:
    engine = trainer.engine
    assert engine.updates.optimizer is not None and engine.updates.lr_scheduler is not None
    state = dict(engine.model.parallelized.model.state_dict())
    for number, values in enumerate(engine.updates.optimizer.state.values()):
        state |= {f"{number}.{key}": value for key, value in values.items()}
    numbers = {
        "updates": engine.updates.clock.updates,
        "lr": engine.updates.lr_scheduler.get_last_lr()[0],
    }
    return state | {name: torch.tensor(value) for name, value in numbers.items()}


def assert_equal_states(one: Trainer, other: Trainer) -> None:
    first, second = get_state(one), get_state(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# ---- what counts as bad ------------------------------------------------------------------------


def judge(losses: list[float], norms: list[float] | None = None, **options: Any) -> Any:
    measured = Measurement(
        losses=losses, norms=norms or [1.0] * len(losses), parts={}, seconds=1.0, tokens=1, slots=1,
        labels=1, samples=1,
    )  # fmt: skip
    recent = options.pop("recent", RecentValues(None))
    return find_first_bad(measured, recent, **{"tolerates_infinity": False, **options})


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_the_first_loss_that_is_not_finite_is_found(bad: float) -> None:
    assert judge([1.0, bad, NAN]) == (1, f"the loss is {bad}")


def test_a_bad_gradient_is_found_though_the_loss_is_fine() -> None:
    assert judge([1.0, 1.0], [1.0, INF]) == (1, "the gradient is inf")


def test_an_fp16_overflow_of_the_gradient_is_not_a_bad_loss() -> None:
    assert judge([1.0, 1.0], [INF, NAN], tolerates_infinity=True) is None
    assert judge([1.0, NAN], [INF, NAN], tolerates_infinity=True) == (1, "the loss is nan")


def test_a_spike_is_far_above_the_median_once_enough_is_known() -> None:
    recent = RecentValues(5.0)
    assert judge([1.0, 100.0] * (LEAST // 2 - 1) + [1.0], recent=recent) is None, "too few yet"
    assert judge([1.0] * 9, recent=recent) is None
    assert judge([4.9, 5.1], recent=recent) == (
        1,
        "the loss is 5.1, above 5 times its recent median",
    )
    found = judge([1.0], [6.0], recent=recent)
    assert found == (0, "the gradient norm is 6, above 5 times its recent median")
    assert judge([1000.0], [1000.0], recent=RecentValues(None)) is None, "off unless asked for"


def test_losses_around_zero_have_no_spikes() -> None:
    recent = RecentValues(2.0)
    assert judge([-1.0, 0.5] * LEAST, recent=recent) is None
    assert judge([50.0], recent=recent) is None


def test_settings_that_contradict_each_other() -> None:
    def check(*words: str) -> list[str]:
        return find_problems(parse_arguments(list(words)))

    assert any("must be above 1" in text for text in check("--loss-spike-threshold", "1"))
    rollback = ("--on-bad-loss", "rollback")
    assert any("needs checkpoints" in text for text in check(*rollback, "--save", "none"))
    idle = find_idle_settings(parse_arguments(["--max-rollbacks", "2"]))
    assert idle == ["--max-rollbacks has no effect without --on-bad-loss rollback."]


# ---- stop --------------------------------------------------------------------------------------


def test_stop_names_the_step_and_the_samples(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"the loss is nan at step 3 \(samples 8, 9, 10, 11\)"):
        train(save=str(tmp_path), save_interval=1)
    assert [path.name for path in find_checkpoints(tmp_path)][-1] == "iter_0000002"


# ---- skip --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adafactor"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_skip_is_as_if_the_batch_had_not_been_drawn(optimizer: str, value: float) -> None:
    """Weights, statistics of batch norms, optimizer, step counter and learning rate, to the bit.

    Fused optimizers (adam, sgd) skip on the device, and the verdict is read one step late.
    """

    class Bad(Trainer):
        bad_value = value

    skipped = train(Bad, on_bad_loss="skip", optimizer=optimizer)
    assert skipped.engine.updates.clock.updates == 9
    assert_equal_states(skipped, train(WithoutTheBatch, optimizer=optimizer))


def test_a_skipped_first_update_leaves_no_momentum() -> None:
    """torch's fused SGD leaves the buffers of a skipped first update uninitialized."""
    weight = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5, fused=True)
    for bad, value in ((True, NAN), (False, 1.0), (False, 1.0)):
        weight.grad = torch.full_like(weight, value)
        step_unless(torch.tensor(float(bad)), optimizer, optimizer.step)
        if bad:
            assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.zeros(1000))
    assert torch.equal(weight.detach(), torch.full((1000,), -1.5))
    assert obeys_flags(optimizer)
    damped = torch.optim.SGD([weight], lr=1.0, momentum=0.5, dampening=0.1, fused=True)
    assert not obeys_flags(damped), "its first momentum is the whole gradient, not a part of it"


def test_spikes_are_skipped_if_asked_for(tmp_path: Path) -> None:
    class Spike(Trainer):
        bad_value = 300.0
        samples = 40

        def train_valid_test_datasets_provider(self) -> Any:
            rows, *rest = super().train_valid_test_datasets_provider()
            return rows[12:] * 3 + rows[8:12] + rows[:8], *rest

    settings = {"on_bad_loss": "skip", "save": str(tmp_path), "lr": 0.001}
    assert train(Spike, **settings, loss_spike_threshold=10.0).engine.updates.clock.updates == 23
    (bad,) = [line for line in read_lines(tmp_path) if "bad_loss" in line]
    assert bad["step"] == 21 and bad["samples"] == [84, 85, 86, 87] and bad["bad_loss"] > 1000
    assert train(Spike, **settings, overwrite=True).engine.updates.clock.updates == 24


def test_a_batch_that_is_skipped_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    train(on_bad_loss="skip", log_level="warning")
    said = capsys.readouterr().err
    assert "the loss is nan at step 3 (samples 8, 9, 10, 11): the batch was skipped." in said


def test_your_own_loop_skips_and_names_what_it_cannot_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(policy: str) -> RapidformerEngine:
        values = {"micro_batch_size": 4, "lr": 0.05, "log_level": "warning", "on_bad_loss": policy}
        engine = RapidformerEngine(args=values)
        trainer = Trainer(engine)
        rows, *_ = trainer.train_valid_test_datasets_provider()
        loader = engine.data.build_loader(rows, is_training=True, shuffle=False)
        torch.manual_seed(1)
        model, optimizer, scheduler = engine.compose(Model())
        for batch in loader:
            engine.backward(model(**batch))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return engine

    engine = run("skip")
    said = capsys.readouterr().err
    assert "the loss is nan at step 3 (samples 8, 9, 10, 11): the batch was skipped." in said
    assert engine.updates.clock.updates == 9
    assert all(bool(p.isfinite().all()) for p in engine.model.parameters)


# ---- rollback ----------------------------------------------------------------------------------


def test_rollback_restores_a_checkpoint_and_takes_the_next_samples(tmp_path: Path) -> None:
    class Recorder(Trainer):
        seen: list[list[float]]

        def run_forward_step(self, batch: Any, model: Any) -> Any:
            self.seen.append(batch["labels"].tolist())
            return super().run_forward_step(batch, model)

    Recorder.seen = []
    settings = {"on_bad_loss": "rollback", "save_interval": 2, "micro_batch_size": 4}
    rolled = train(Recorder, save=str(tmp_path / "a"), **settings)
    assert rolled.engine.updates.clock.updates == 9, "10 batches, one of them bad"
    # From step 2, the fourth batch follows: what the run without the bad batch does.
    assert_equal_states(rolled, train(WithoutTheBatch, micro_batch_size=4))
    assert sum(any(map(math.isnan, labels)) for labels in Recorder.seen) == 1
    steps = [line["step"] for line in read_lines(tmp_path / "a") if "loss" in line]
    assert steps == sorted(set(steps)), "no step is there twice"

    # Killed right after the rollback, or later: the same end.
    for number in (2, 4):
        folder = tmp_path / f"b{number}"
        train(save=str(folder), **settings, exit_interval=number, train_iters=number + 1)
        assert_equal_states(rolled, train(save=str(folder), load=str(folder), **settings))


def test_a_rollback_keeps_the_bad_batch_in_the_metrics(tmp_path: Path) -> None:
    """The sixth step is bad, the fourth is restored: the fifth's line goes, the bad one's stays."""
    settings = {"on_bad_loss": "rollback", "save_interval": 2, "global_batch_size": 2}
    train(save=str(tmp_path), **settings, log_interval=1, train_iters=7)
    lines = read_lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5]
    (bad,) = [line for line in lines if "bad_loss" in line]
    assert (bad["step"], bad["bad_step"], bad["samples"]) == (4, 6, [10, 11])


def test_rollbacks_are_limited_and_need_a_checkpoint(tmp_path: Path) -> None:
    settings = {"on_bad_loss": "rollback", "save": str(tmp_path)}
    with pytest.raises(TrainingError, match="there is no checkpoint to return to yet"):
        train(save_interval=5, **settings)
    with pytest.raises(TrainingError, match=r"rolled back 0 times already \(--max-rollbacks\)"):
        train(save_interval=1, max_rollbacks=0, overwrite=True, **settings)


# ---- several ranks -----------------------------------------------------------------------------


class Causal(Trainer):
    """A small GPT-2, which can be split every way; one rank sees the bad sample."""

    def train_valid_test_datasets_provider(self) -> Any:
        rows = [[i, (3 * i + 1) % 32, (5 * i + 2) % 32] for i in range(32)]
        kept = [row for row in rows if row[0] not in self.left_out]
        return [{"input_ids": row, "labels": row} for row in kept], None, None, None

    def model_optimizer_lr_scheduler_provider(self) -> Any:
        torch.manual_seed(1)
        config = GPT2Config(
            vocab_size=32, n_positions=4, n_embd=8, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return GPT2LMHeadModel(config), None, None

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        is_bad = bool((batch["input_ids"][:, 0] == BAD).any())
        return model(**batch).loss * (NAN if is_bad else 1.0)


class CausalWithoutTheBatch(Causal):
    left_out = (8, 9, 10, 11)


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "shards": {"zero_3_memory_optimization": True},
    "slices": {"tensor_model_parallel_size": 2},
    "stages": {"pipeline_model_parallel_size": 2},
}


def _compare_in_layouts(folder: Path) -> dict[str, bool]:
    """For each layout and policy, whether the end is that of a run without the batch.

    An update follows the bad one.
    """
    found = {}
    for name, layout in LAYOUTS.items():
        size = {"micro_batch_size": 2, **layout}
        expected = train(CausalWithoutTheBatch, **size, train_iters=3)
        weights = expected.engine.checkpoints.gather_weights()
        for policy in ("skip", "rollback"):
            needs = {"save": str(folder / name), "save_interval": 2} if policy == "rollback" else {}
            trainer = train(Causal, on_bad_loss=policy, train_iters=4, **size, **needs)
            actual = trainer.engine.checkpoints.gather_weights()
            found[f"{name} {policy}"] = trainer.engine.updates.clock.updates == 3 and all(
                torch.equal(value, actual[key]) for key, value in weights.items()
            )
    return found


def test_all_ranks_agree_in_every_layout(tmp_path: Path) -> None:
    for found in run_in_kept_processes(_compare_in_layouts, 2, tmp_path):
        assert found == dict.fromkeys(found, True) and len(found) == 2 * len(LAYOUTS)
