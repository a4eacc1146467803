"""The engine's verbs in a loop of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from rapidformer import RapidformerEngine
from rapidformer.errors import ConfigurationError, DataError, RapidformerError
from rapidformer.log import warn_once
from rapidformer.overlay import list_layers
from tests.accel.models import make
from tests.processes import run_in_kept_processes


def make_engine(**settings: Any) -> RapidformerEngine:
    return RapidformerEngine(args={"lr": 0.1, "log_level": "error", **settings})


def make_parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_compose_returns_what_it_was_given_in_the_same_order() -> None:
    model, optimizer = make_parts()
    loader = DataLoader(TensorDataset(torch.rand(8, 3)), batch_size=2)
    composed = make_engine().compose(
        model=model, optimizer=optimizer, train_dataloader=loader, eval_dataloader=loader
    )
    assert composed[0] is model and composed[1] is optimizer
    assert len(composed) == 5
    assert [len(batch[0]) for batch in composed[3]] == [2, 2, 2, 2]
    assert isinstance(model, nn.Linear) and type(model).__name__ == "Linear"


def test_compose_without_an_optimizer_makes_adamw_from_the_flags() -> None:
    model, _ = make_parts()
    _, optimizer, _ = make_engine(weight_decay=0.3, adam_beta2=0.95).compose(model_obj=model)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_compose_fills_in_the_schedules_length_from_the_epochs() -> None:
    model, optimizer = make_parts()
    loader = DataLoader(TensorDataset(torch.rand(10, 3)), batch_size=2)
    engine = make_engine(epochs=4, micro_batch_size=2)
    schedule = partial(
        get_linear_schedule_with_warmup,
        num_warmup_steps=0,
        num_training_steps=engine.args.train_iters,
    )
    _, _, scheduler, _ = engine.compose(model, optimizer, schedule, loader)
    assert engine.data.get_train_iters() == 20
    assert scheduler.lr_lambdas[0](10) == pytest.approx(0.5)


def test_compose_says_when_the_schedules_length_is_unknown() -> None:
    model, optimizer = make_parts()
    schedule = partial(get_linear_schedule_with_warmup, num_warmup_steps=0, num_training_steps=None)
    with pytest.raises(RapidformerError, match="--train-iters"):
        make_engine().compose(model, optimizer, schedule)


def test_compose_without_a_learning_rate() -> None:
    with pytest.raises(ConfigurationError, match="--lr"):
        RapidformerEngine(args={"log_level": "error"}).compose(nn.Linear(1, 1))


def test_compose_twice_is_refused() -> None:
    engine = make_engine()
    engine.compose(nn.Linear(1, 1))
    with pytest.raises(RapidformerError, match="already composed a model"):
        engine.compose(nn.Linear(1, 1))


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, _ = make_parts()
    _, other = make_parts()
    with pytest.raises(RapidformerError, match="holds 2 parameters not in the model given"):
        make_engine().compose(model, other)
    other.param_groups[0]["params"].pop()
    with pytest.raises(RapidformerError, match="holds 1 parameter not in the model given"):
        make_engine().compose(model, other)


def test_weighted_backward_is_the_mean_over_all_labels() -> None:
    """Micro-batches of 1, 2 and 5 rows: the gradient is that of the 8 rows at once."""
    model, optimizer = make_parts()
    rows, reference = torch.rand(8, 3), make_parts()[0]
    reference(rows).mean().backward()
    engine = make_engine(gradient_accumulation_steps=3, micro_batch_size=1)
    engine.compose(model, optimizer)
    for part in rows.split([1, 2, 5]):
        engine.backward(model(part).mean(), weight=len(part))
    torch.testing.assert_close(model.weight.grad, reference.weight.grad, rtol=1e-6, atol=0)


def test_a_micro_batch_without_labels_changes_nothing() -> None:
    """Its mean is not a number; its weight is 0."""
    model, optimizer = make_parts()
    engine = make_engine(gradient_accumulation_steps=2, micro_batch_size=1)
    engine.compose(model, optimizer)
    rows = torch.rand(4, 3)
    engine.backward(model(rows).mean(), weight=4)
    labels = torch.full((4,), -100)
    empty = nn.functional.cross_entropy(model(rows).expand(4, 3), labels)
    assert torch.isnan(empty)
    engine.backward(empty, weight=0)
    reference = make_parts()[0]
    reference(rows).mean().backward()
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)


def test_accumulate_decides_by_hand() -> None:
    model, optimizer = make_parts()
    engine = make_engine()
    engine.compose(model, optimizer)
    before = model.weight.detach().clone()
    for is_last in (False, False, True):
        with engine.accumulate(is_last=is_last):
            engine.backward(model(torch.rand(2, 3)).mean())
        engine.step()
        assert torch.equal(model.weight, before) is not is_last
    with engine.no_sync():
        engine.backward(model(torch.rand(2, 3)).mean())
    assert engine.clip_grad_norm(1.0) is None


def test_clipping_by_hand_is_not_done_again() -> None:
    model, optimizer = make_parts()
    engine = make_engine(clip_grad=1e-9)
    engine.compose(model, optimizer)
    engine.backward(model(torch.ones(2, 3)).mean() * 100)
    norm = engine.clip_grad_norm(1.0)
    assert norm is not None and norm > 100
    total = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert total == pytest.approx(1.0, rel=1e-4)
    optimizer.step()
    assert (model.bias - make_parts()[0].bias).abs().item() > 1e-3


def test_gather_joins_rows_of_unequal_numbers() -> None:
    for result in run_in_kept_processes(_gather_unequal, 3):
        assert result == [[0.0], [1.0], [1.0], [2.0], [2.0], [2.0]]


def _gather_unequal() -> list[list[float]]:
    engine = make_engine()
    rank = engine.args.rank
    return engine.gather(torch.full((rank + 1, 1), float(rank))).tolist()


def test_gather_pads_on_request() -> None:
    for result, message in run_in_kept_processes(_gather_ragged, 2):
        assert result == [[1, 1, 0], [1, 1, 1]]
        assert "pad_value" in message


def _gather_ragged() -> tuple[list[list[int]], str]:
    engine = make_engine()
    ragged = torch.ones(1, 2 + engine.args.rank, dtype=torch.long)
    try:
        engine.gather(ragged)
    except RapidformerError as error:
        message = str(error)
    return engine.gather(ragged, pad_value=0).tolist(), message


def test_a_stepped_optimizer_is_refused_when_parameters_are_split() -> None:
    for message in run_in_kept_processes(_compose_stepped_optimizer, 2):
        assert "engine.load_checkpoint" in message


def _compose_stepped_optimizer() -> str:
    model, _ = make_parts()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(1, 3)).sum().backward()
    optimizer.step()
    try:
        make_engine(zero_1_memory_optimization=True).compose(model, optimizer)
    except RapidformerError as error:
        return str(error)
    return "no error"


def test_the_first_loader_built_is_the_training_one() -> None:
    """A custom loop builds its evaluation loader second: epochs are still those of the first."""
    model, optimizer = make_parts()
    engine = make_engine(epochs=2, micro_batch_size=2, global_batch_size=4)
    rows = [{"x": torch.rand(3)} for _ in range(10)]
    train = engine.data.build_loader(rows)
    evaluation = engine.data.build_loader(rows[:3])
    assert engine.data.get_train_iters() == 2 * 3
    engine.compose(model, optimizer, lambda opt: torch.optim.lr_scheduler.ConstantLR(opt, 1.0))
    for _ in range(2):
        for batch in train:
            engine.backward(model(batch["x"]).mean())
            engine.step()
        assert sum(len(batch["x"]) for batch in evaluation) == 3
    assert engine.updates.clock.updates == 6, "the smaller batch at an epoch's end is an update too"


def test_gathering_after_the_loop_keeps_every_row_once() -> None:
    """9 rows in batches of 2 on 3 processes: two of them end with a filler."""
    for inside, ahead, joined, totals in run_in_kept_processes(_gather_both_ways, 3):
        assert sorted(inside) == sorted(ahead) == list(range(9))
        assert sorted(joined) == list(range(9))
        assert totals == 9


def _gather_both_ways() -> tuple[list[int], list[int], list[int], int]:
    engine = make_engine(micro_batch_size=2)
    rows = [{"x": torch.tensor(i)} for i in range(9)]
    loader = engine.data.build_loader(rows, is_training=False)
    inside, mine = [], []
    for batch in loader:
        inside += engine.gather(batch["x"]).tolist()
        mine.append(batch["x"])
    # A script may have fetched the next batch, or the end, before it gathers what the model said.
    model = engine.model.compose_for_evaluation(torch.nn.Identity())
    batches, ahead = iter(loader), []
    coming = next(batches, None)
    while coming is not None:
        current, coming = coming, next(batches, None)
        ahead += engine.gather(model(current["x"]) + 0).tolist()
    count = sum(each.info.rows for each in loader.iterate_micro_batches())
    joined = engine.gather(torch.cat(mine)).tolist()
    return inside, ahead, joined, int(engine.gather(torch.tensor([count, count])).sum()) // 2


def test_a_filler_of_the_evaluation_does_not_silence_later_training() -> None:
    for weight in run_in_kept_processes(_train_after_evaluation, 2):
        assert weight == 2.0


def _train_after_evaluation() -> float:
    engine = make_engine(micro_batch_size=2)
    model, optimizer = make_parts()
    engine.compose(model, optimizer)
    rows = [{"x": torch.rand(3)} for _ in range(5)]
    for _ in engine.data.build_loader(rows, is_training=False):
        pass
    engine.backward(model(torch.rand(2, 3)).mean())
    engine.step()
    return float(engine.updates.clock.total_weight)


def test_an_unknown_length_leaves_the_rate_constant() -> None:
    engine = make_engine()
    model, _ = make_parts()
    engine.compose(model)
    rates = []
    for _ in range(3):
        rates.append(engine.updates.get_learning_rate())
        engine.backward(model(torch.rand(2, 3)).mean())
        engine.step()
    assert rates == [0.1, 0.1, 0.1]


def test_the_global_batch_is_reached_in_the_loaders_own_batches() -> None:
    model, optimizer = make_parts()
    engine = make_engine(global_batch_size=64, epochs=1)
    loader = DataLoader(TensorDataset(torch.rand(256, 3)), batch_size=16)
    _, _, _, loader = engine.compose(model, optimizer, train_dataloader=loader)
    for (batch,) in loader:
        engine.backward(model(batch).mean())
        engine.step()
    assert engine.updates.clock.updates == 4
    with pytest.raises(ConfigurationError, match="batch_size 24"):
        make_engine(global_batch_size=64).compose(
            *make_parts(), train_dataloader=DataLoader(list(range(99)), batch_size=24)
        )


@pytest.mark.parametrize("switch", [{}, {"zero_1_memory_optimization": True}])
def test_every_process_starts_from_the_first_ones_weights(switch: dict[str, Any]) -> None:
    first, second = run_in_kept_processes(_compose_other_weights, 2, switch)
    assert first == second == [[0.0, 0.0, 0.0]]


def _compose_other_weights(switch: dict[str, Any]) -> list[list[float]]:
    engine = make_engine(**switch)
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, float(engine.args.rank))
    engine.compose(model)
    weight: Any = model.weight
    return (weight.full_tensor() if switch else weight).tolist()


def test_saving_in_the_middle_of_an_update_is_refused(tmp_path: Any) -> None:
    model, optimizer = make_parts()
    engine = make_engine(gradient_accumulation_steps=2, micro_batch_size=1)
    engine.compose(model, optimizer)
    engine.backward(model(torch.rand(2, 3)).mean())
    with pytest.raises(RapidformerError, match=r"after optimizer\.step"):
        engine.save_checkpoint(tmp_path)


def test_a_weight_of_zero_may_be_a_tensor() -> None:
    model, optimizer = make_parts()
    engine = make_engine(gradient_accumulation_steps=2, micro_batch_size=1)
    engine.compose(model, optimizer)
    rows = torch.rand(4, 3)
    empty = nn.functional.cross_entropy(model(rows).expand(4, 3), torch.full((4,), -100))
    assert torch.isnan(empty)
    engine.backward(empty, weight=torch.tensor(0.0))
    engine.backward(model(rows).mean(), weight=torch.tensor(4.0))
    reference = make_parts()[0]
    reference(rows).mean().backward()
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)


def test_fp16_needs_no_smaller_scale_on_two_processes() -> None:
    """Weights are counted in a shared unit: many labels do not use up fp16's range."""
    for skipped, scale in run_in_kept_processes(_train_in_fp16, 2):
        assert (skipped, scale) == (0, 2.0**16)


def _train_in_fp16() -> tuple[int, float]:
    engine = make_engine(fp16=True, micro_batch_size=4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    engine.compose(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(20):
        engine.backward(model(torch.rand(4, 8)).mean(), weight=3000)
        engine.step()
    assert engine.updates.scaler is not None
    return engine.updates.clock.skipped, engine.updates.scaler.scale


# ---- loaders on several processes --------------------------------------------------------------


def test_training_on_several_processes_without_compose_is_refused() -> None:
    for looked, batches, message in run_in_kept_processes(_train_without_compose, 2):
        assert looked == 2, "a look at one batch is no training"
        assert batches == 1
        assert "the model was not passed to engine.compose()" in message


def _train_without_compose() -> tuple[int, int, str]:
    engine = make_engine(micro_batch_size=2)
    loader = engine.data.build_loader([{"x": torch.rand(3)} for _ in range(8)])
    looked = len(next(iter(loader))["x"])
    batches = 0
    try:
        for _ in loader:
            batches += 1
    except RapidformerError as error:
        return looked, batches, str(error)
    return looked, batches, ""


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Numbers in a row; each process reads every ``step``-th of them from its own start."""

    def __init__(self, start: int = 0, step: int = 1) -> None:
        self.numbers = range(start, 12, step)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({"x": torch.tensor([float(number)])} for number in self.numbers)


def test_a_stream_that_shards_itself_is_refused_and_a_whole_one_is_dealt_out() -> None:
    messages, rows = zip(*run_in_kept_processes(_read_streams, 2), strict=True)
    for built, adopted in messages:
        assert "the processes read different rows from Stream" in built
        assert "split_dataset_by_node" in adopted
    assert rows == ([0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11])


def _read_streams() -> tuple[tuple[str, str], list[int]]:
    engine = make_engine(micro_batch_size=2)
    sharded = Stream(engine.args.rank, 2)
    loaders = (
        engine.data.build_loader(sharded, is_training=False),
        engine.data.adopt_loader(DataLoader(sharded, batch_size=2), is_training=False),
    )
    messages = []
    for loader in loaders:
        with pytest.raises(DataError) as error:
            next(iter(loader))
        messages.append(str(error.value))
    whole = engine.data.build_loader(Stream(), is_training=False)
    rows = [int(row) for batch in whole for row in batch["x"].flatten()]
    return (messages[0], messages[1]), rows


# ---- what a loss weighs ------------------------------------------------------------------------


class ShiftedCausalLM(nn.Linear):
    """Named as models are that compare each position with the next label."""


def make_labelled_rows(*counts: int) -> list[dict[str, torch.Tensor]]:
    """Rows of 4 labels, of which the first so many count."""
    labels = torch.full((len(counts), 4), -100)
    for row, count in zip(labels, counts, strict=True):
        row[:count] = 1
    return [{"x": torch.rand(3), "labels": row} for row in labels]


@pytest.mark.parametrize(
    ("model", "weight"), [(nn.Linear(3, 1), 6.0), (ShiftedCausalLM(3, 1), 4.0)]
)
def test_backward_counts_the_labels_of_the_batch_in_hand(model: Any, weight: float) -> None:
    engine = make_engine(micro_batch_size=2)
    loader = engine.data.build_loader(make_labelled_rows(2, 4))
    engine.compose(model)
    for batch in loader:
        engine.backward(model(batch["x"]).mean())
        assert engine.updates.clock.total_weight == weight
        engine.step()
    (update,) = engine.data.iterate_updates(loader)
    (result,) = engine.run_update(lambda batch: model(batch["x"]).mean(), update)
    assert result.weight == engine.updates.clock.total_weight == weight


def test_a_forward_step_that_fails_has_ended() -> None:
    """A later ``backward_within`` was taken for a part of it."""
    engine = make_engine(micro_batch_size=2)
    model, optimizer = make_parts()
    loader = engine.data.build_loader(make_labelled_rows(2))
    engine.compose(model, optimizer)
    (update,) = engine.data.iterate_updates(loader)
    with pytest.raises(KeyError):
        engine.run_update(lambda batch: batch["nothing"], update)
    with pytest.raises(RapidformerError, match="for the forward step"):
        engine.updates.backward_within(model(torch.ones(1, 3)).mean())


def test_a_fillers_loss_and_its_parts_weigh_nothing() -> None:
    engine = make_engine(micro_batch_size=2)
    model, optimizer = make_parts()
    loader = engine.data.build_loader(make_labelled_rows(2))
    engine.compose(model, optimizer)
    (micro_batch,) = loader.iterate_micro_batches()

    def forward(batch: Any) -> Any:
        loss = model(batch["x"]).mean()
        return loss, None, {"own": (loss, 5.0), "same": (loss, None)}

    weights = {
        name: w
        for name, (_, w) in engine.updates.weights.run_forward(forward, micro_batch).means.items()
    }
    assert weights == {"own": 5.0, "same": 2.0, "loss": 2.0}
    filler = micro_batch._replace(is_filler=True)
    assert {w for _, w in engine.updates.weights.run_forward(forward, filler).means.values()} == {
        0.0
    }


def test_a_loss_of_unknown_weight_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    warn_once.cache_clear()
    model, optimizer = make_parts()
    engine = make_engine(gradient_accumulation_steps=2, micro_batch_size=1, log_level="warning")
    engine.compose(model, optimizer)
    for _ in range(4):
        engine.backward(model(torch.rand(2, 3)).mean())
        engine.step()
    said = capsys.readouterr().err
    assert said.count("how many labels this loss is a mean over") == 1 and "weight=n" in said


def test_batches_without_tensors_train_too() -> None:
    """Texts that the loop itself makes into tensors: nothing is counted, nothing is lost."""
    model, optimizer = make_parts()
    engine = make_engine(micro_batch_size=2)
    loader = engine.data.build_loader(["some text", "and more"], collate_fn=list)
    engine.compose(model, optimizer)
    for texts in loader:
        assert texts == ["some text", "and more"]
        engine.backward(model(torch.ones(2, 3)).mean())
    assert model.weight.grad.abs().sum() > 0


def test_settings_built_directly_accumulate_to_the_global_batch() -> None:
    """They once forgot what was given, and updated after every batch of the DataLoader."""
    from torch.utils.data import DataLoader

    from rapidformer.config import Settings

    engine = RapidformerEngine(args=Settings(global_batch_size=32, lr=0.1, log_level="error"))
    rows = [{"x": torch.ones(1), "labels": torch.ones(())} for _ in range(64)]
    engine.compose(nn.Linear(1, 1), train_dataloader=DataLoader(rows, batch_size=16))  # type: ignore[arg-type]
    assert engine.updates.clock.rounds_per_update == 2


def test_a_validation_pass_before_backward_leaves_the_weight_of_the_batch() -> None:
    model = nn.Linear(3, 1, bias=False)
    engine = make_engine(global_batch_size=2, micro_batch_size=1, clip_grad=0.0)
    rows = make_labelled_rows(1, 3)
    train = engine.data.build_loader(rows, is_training=True)
    valid = engine.data.build_loader(rows, is_training=False)
    engine.compose(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in train:
        loss = model(batch["x"]).mean()
        with torch.no_grad():
            for other in valid:
                model(other["x"])
        engine.backward(loss)
    assert float(engine.updates.clock.total_weight) == 4.0


def test_a_model_keeps_no_switch_of_an_earlier_engine() -> None:
    model = nn.Linear(3, 3)
    make_engine(mixed_precision="bf16").compose(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list_layers(model) == ["pickle", "autocast"]
    make_engine().compose(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list_layers(model) == ["pickle"]


def test_a_model_keeps_no_cache_in_training_only() -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    ids = torch.arange(4)[None]
    assert model(ids).past_key_values is not None
    make_engine().compose(model)
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values is not None
    assert model.eval()(ids).past_key_values is not None
    assert model.config.use_cache is True


def test_a_cache_still_decides_whether_packed_examples_attend_to_each_other() -> None:
    """transformers keeps them apart by their positions only where no cache is filled."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    batch = {"input_ids": torch.arange(6)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    batch["labels"] = batch["input_ids"]
    expected = [model(**batch).loss, model(**batch, use_cache=False).loss]
    assert not torch.isclose(*expected)
    make_engine().compose(model)
    torch.testing.assert_close(model(**batch).loss, expected[0])
    torch.testing.assert_close(model(**batch, use_cache=False).loss, expected[1])
    model.config.use_cache = False
    torch.testing.assert_close(model(**batch).loss, expected[1])


def test_explain_names_every_switch() -> None:
    said = make_engine(compile=True, compile_backend="inductor").explain().splitlines()
    assert any(line.startswith("on             compilation: ") for line in said)
    assert any(line.startswith("off            recompute: ") for line in said)


@pytest.mark.parametrize(("kind", "state"), [("t5", "on"), ("bert", "not applicable")])
def test_explain_says_of_a_composed_model_what_was_applied_to_it(kind: str, state: str) -> None:
    """Also of rows that are applied by another row's module, or by the engine."""
    engine = make_engine()
    engine.compose(make(kind))
    said = engine.explain().splitlines()
    assert any(line.startswith(f"{state:<15}bias layout: ") for line in said)
    assert any(line.startswith("on             update clock: ") for line in said)
    engine.close()


def test_modules_kept_in_evaluation_mode_stay_in_it() -> None:
    """compose() tries batches, and an evaluation comes and goes."""
    model: Any = make("bert", dropout=0.1).train()
    model.bert.embeddings.eval()
    before = [module.training for module in model.modules()]
    engine = RapidformerEngine(args={"log_level": "error", "lr": 0.1})
    engine.compose(model)
    assert [module.training for module in model.modules()] == before
    with engine.model.evaluating():
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
