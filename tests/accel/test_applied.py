"""A model that was composed, trained and closed is the plain model again, but for its weights."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from rapidformer.accel.applied import Applied
from rapidformer.compat.patches import Change
from rapidformer.dist.collectives import gather_from_all
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.overlay import list_layers
from tests.parity.harness import SETTINGS, make_adamw, make_sgd, run_updates
from tests.parity.models import build_model, build_rows, collate
from tests.processes import run_in_kept_processes

Settings = dict[str, Any]


def look(model: nn.Module) -> dict[str, Any]:
    """Everything about a model but the values of its weights."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        seen[f"{name} class"] = type(module)
        for key, value in vars(module).items():
            if key == "_parameters":
                kinds = {k: p if p is None else describe(p) for k, p in value.items()}
                seen[f"{name} parameters"] = list(kinds.items())
            elif key == "_buffers":
                seen[f"{name} buffers"] = [(k, type(b)) for k, b in value.items()]
            elif isinstance(value, (dict, set)):
                seen[f"{name}.{key}"] = value.copy()
            elif key != "training":
                seen[f"{name}.{key}"] = value
    config = getattr(model, "config", None)
    # BERT itself notes the kind of its labels there, in its first loss.
    values = {} if config is None else config.to_dict()
    seen["config"] = {key: value for key, value in values.items() if key != "problem_type"}
    seen["attention"] = getattr(config, "_attn_implementation", None)
    owners = [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]
    seen["ties"] = [[n for n, other in owners if other == p] for _, p in owners]
    return seen


def describe(parameter: Any) -> tuple[Any, ...]:
    hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return type(parameter), parameter.shape, [list((table or {}).values()) for table in hooks]


def check_plain(model: nn.Module, before: dict[str, Any]) -> None:
    after = look(model)
    different = [key for key in before | after if before.get(key, "none") != after.get(key, "none")]
    assert not different, {key: (before.get(key), after.get(key)) for key in different}
    assert list(before) == list(after)


def train(model: nn.Module, name: str, settings: Settings, **more: Any) -> RapidformerEngine:
    torch.set_num_threads(1)
    engine = RapidformerEngine(args={**SETTINGS, **settings})
    loader = engine.data.build_loader(
        build_rows(name, 16), collate, shuffle=False, is_training=True
    )
    engine.compose(model, more.get("make_optimizer", make_sgd)(model))
    model.train()
    run_updates(engine, model, loader)
    return engine


ONE_PROCESS = [
    ("gpt2", {}),
    ("gpt2", {"recompute_granularity": "selective"}),
    ("gpt2", {"checkpoint_activations": True, "compile": True, "compile_backend": "eager"}),
    ("bert", {"dynamic_shape": "on", "compile": True, "compile_backend": "eager"}),
    ("t5", {"dynamic_shape": "on", "fused_loss": "on"}),
    ("deberta", {"dynamic_shape": "on"}),
    ("gpt2", {"fused_loss": "on", "attention": "eager"}),
    ("gpt2-lora", {"mixed_precision": "bf16"}),
    ("mixtral", {"mixed_precision": "bf16"}),
    ("gpt2-prompt", {}),
    ("unplanned", {"compile": True, "compile_backend": "eager"}),
]


@pytest.mark.parametrize(("name", "settings"), ONE_PROCESS, ids=str)
def test_a_closed_model_is_the_plain_model(
    name: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAPIDFORMER_EMULATE_16_BIT", "1")
    model = build_model(name)
    before, parameters = look(model), dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in parameters.items()}
    engine = train(model, name, settings)
    assert engine.model.parallelized.applied.rows
    engine.close()
    check_plain(model, before)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in parameters.items())
    trained = {name for name, p in after.items() if p.requires_grad}
    assert any(not torch.equal(after[name], values[name]) for name in trained)
    for name in after.keys() - trained:  # also if adapters rounded them
        assert after[name].dtype == values[name].dtype and torch.equal(after[name], values[name])


def test_what_the_user_changes_after_compose_stays() -> None:
    model: Any = build_model("gpt2")
    engine = RapidformerEngine(args={**SETTINGS, "checkpoint_activations": True})
    engine.compose(model, make_sgd(model))
    seen: list[Any] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    model.note, model.config.use_cache = "mine", False
    engine.close()
    assert len(model._forward_hooks) == 1
    assert model.note == "mine" and model.config.use_cache is False


def test_a_second_engine_takes_the_model_over() -> None:
    """With other settings; the first one says so if it is used again."""
    model = build_model("gpt2")
    first = train(model, "gpt2", {"checkpoint_activations": True})
    second = train(model, "gpt2", {"compile": True, "compile_backend": "eager"})
    assert not any("recompute" in list_layers(module) for module in model.modules())
    with pytest.raises(RapidformerError, match="another engine has composed its model since"):
        first.backward(torch.zeros((), requires_grad=True))
    second.close()


def test_an_earlier_engine_does_not_live_on_in_the_model() -> None:
    model = build_model("gpt2")
    first: Any = train(model, "gpt2", {}, make_optimizer=make_adamw)
    gone = [weakref.ref(first), weakref.ref(first.updates.optimizer)]
    second = train(model, "gpt2", {})
    del first
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    del second
    gc.collect()


def test_a_copy_of_a_composed_model_works_and_belongs_to_nobody() -> None:
    model = build_model("gpt2")
    engine = train(model, "gpt2", {"checkpoint_activations": True})
    twin = copy.deepcopy(model)
    engine.close()
    batch = collate(build_rows("gpt2", 2))
    assert torch.equal(twin(**batch).loss, model(**batch).loss)
    train(twin, "gpt2", {}).close()


def test_two_engines_side_by_side_are_two_bare_loops() -> None:
    """A student that learns from a teacher, which learns too."""
    rows = [collate(build_rows("gpt2", 4)) for _ in range(3)]

    def learn(names: list[Any], engines: list[Any]) -> list[torch.Tensor]:
        teacher, student = names
        optimizers = [
            e.updates.optimizer if e else make_sgd(m) for e, m in zip(engines, names, strict=True)
        ]
        for batch in rows:
            output = teacher(**batch)
            target = output.logits.detach().softmax(-1)
            distance = -(student(**batch).logits.log_softmax(-1) * target).sum(-1)
            distance = distance[batch["attention_mask"].bool()].mean()
            for loss, engine, optimizer in zip(
                (output.loss, distance), engines, optimizers, strict=True
            ):
                engine.backward(loss, weight=1) if engine else loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for model in names for p in model.parameters()]

    def build() -> list[nn.Module]:
        return [build_model("gpt2", layers=2), build_model("gpt2", layers=1)]

    bare = learn(build(), [None, None])
    models, engines = build(), []
    for model, settings in zip(models, ({"checkpoint_activations": True}, {}), strict=True):
        own = {"micro_batch_size": 4, "global_batch_size": 4, "clip_grad": 0.0, **settings}
        engine = RapidformerEngine(args={**SETTINGS, **own})
        engine.compose(model, make_sgd(model))
        engines.append(engine)
    found = learn(models, engines)
    for one, other in zip(found, bare, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for engine in engines:
        engine.close()


def test_a_generator_and_its_critic_are_two_bare_loops() -> None:
    """The generator's loss goes through the critic, which has an engine of its own."""

    def build() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)), nn.Linear(6, 1)

    def learn(maker: nn.Module, critic: nn.Module, engines: list[Any]) -> list[torch.Tensor]:
        optimizers = [
            e.updates.optimizer if e else make_sgd(m)
            for e, m in zip(engines, (maker, critic), strict=True)
        ]
        torch.manual_seed(4)
        for _ in range(4):
            noise, real = torch.randn(5, 4), torch.randn(5, 6)
            for turn in (1, 0):
                judged = critic(maker(noise))
                loss = -judged.mean() if turn == 0 else judged.mean() - critic(real).mean()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                engines[turn].backward(loss, weight=1) if engines[turn] else loss.backward()
                optimizers[turn].step()
        return [p.detach().clone() for m in (maker, critic) for p in m.parameters()]

    bare = learn(*build(), [None, None])
    models, engines = build(), []
    for model in models:
        own = {"micro_batch_size": 5, "global_batch_size": 5, "clip_grad": 0.0}
        engine = RapidformerEngine(args={**SETTINGS, **own})
        engine.compose(model, make_sgd(model))
        engines.append(engine)
    for one, other in zip(learn(*models, engines), bare, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for engine in engines:
        engine.close()


def test_a_refused_switch_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    before = look(model)
    engine = RapidformerEngine(args={**SETTINGS, "checkpoint_activations": True})
    with pytest.raises(ConfigurationError, match="no repeated blocks"):
        engine.compose(model, make_sgd(model))
    check_plain(model, before)


# ---- several ranks -------------------------------------------------------------------------------

TWO_RANKS = [
    ("gpt2", {}),
    ("gpt2", {"zero_1_memory_optimization": True}),
    ("gpt2", {"zero_2_memory_optimization": True, "checkpoint_activations": True}),
    ("gpt2", {"zero_3_memory_optimization": True}),
    ("qwen3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    ("gpt2", {"pipeline_model_parallel_size": 2}),
    ("llama", {"context_parallel_size": 2}),
    ("mixtral", {"expert_model_parallel_size": 2}),
    ("mixtral", {"expert_model_parallel_size": 2, "zero_3_memory_optimization": True}),
]


def close_on_two_ranks(cases: list[tuple[str, Settings]]) -> None:
    for name, settings in cases:
        model = build_model(name)
        before, collected = look(model), dict(model.named_parameters())
        start = {key: p.detach().clone() for key, p in collected.items()}
        engine: Any = train(model, name, settings)
        whole = engine.checkpoints.gather_weights()
        optimizer = engine.updates.optimizer
        engine.close()
        check_plain(model, before)
        weights = dict(model.named_parameters())
        for key, parameter in weights.items():
            assert parameter is collected[key], "a list made before compose is valid again"
            assert not torch.equal(parameter, start[key]), f"{key} is trained"
            if key in whole:  # of a pipeline, the first rank's stage
                torch.testing.assert_close(parameter.detach(), whole[key], rtol=0, atol=0)
        sums = gather_from_all({key: float(p.double().sum()) for key, p in weights.items()})
        assert sums[0] == sums[1], "every rank has all weights"
        assert {id(p) for g in optimizer.param_groups for p in g["params"]} <= {
            id(p) for p in weights.values()
        }
        shapes = [(p.shape, s["momentum_buffer"].shape) for p, s in optimizer.state.items()]
        assert shapes and all(one == other for one, other in shapes)
        again: Any = train(model, name, settings)
        assert again.mesh is engine.mesh, "torch may have cached operations with the first one's"
        again.close()
        check_plain(model, before)
        gone = [weakref.ref(engine), weakref.ref(again)]
        del engine, again
        gc.collect()
        assert [reference() for reference in gone] == [None, None], settings


@pytest.mark.slow
def test_a_closed_model_is_whole_and_plain_on_every_rank() -> None:
    run_in_kept_processes(close_on_two_ranks, 2, TWO_RANKS)


def stay_sharded() -> str:
    model = build_model("gpt2")
    engine = train(model, "gpt2", {"zero_3_memory_optimization": True})
    applied = engine.model.parallelized.applied
    applied.plain.measure_free = lambda device: 0.0
    assert applied.undo() is False and not applied.is_closed
    other = RapidformerEngine(args={**SETTINGS, "zero_3_memory_optimization": True})
    with pytest.raises(RapidformerError, match="do not fit into memory whole"):
        other.compose(model)
    return type(model).__name__


@pytest.mark.slow
def test_weights_that_do_not_fit_whole_stay_sharded() -> None:
    assert run_in_kept_processes(stay_sharded, 2) == ["FSDPGPT2LMHeadModel"] * 2


def test_a_row_copies_the_tables_of_a_model_once() -> None:
    class Counted(dict[str, int]):
        copies = 0

        def copy(self) -> dict[str, int]:
            self.copies += 1
            return dict(self)

    model: Any = nn.Linear(1, 1)
    model.table = Counted(left=1, changed=2)
    applied = Applied(model)
    with applied.row("row"):
        model.table["changed"] = 3
    assert model.table.copies == 1
    assert applied.rows[0].changes == 1
    assert applied.undo()
    assert model.table == {"left": 1, "changed": 2}


def test_rows_in_turn_copy_what_the_row_before_has_changed() -> None:
    class Counted(dict[str, int]):
        copies = 0

        def copy(self) -> dict[str, int]:
            self.copies += 1
            return dict(self)

    model: Any = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].table, model[1].table = Counted(left=1), Counted(left=2)
    applied = Applied(model)
    with applied.in_turn():
        with applied.row("first"):
            model[0].table["first"] = 3
        with applied.row("second"):
            model[0].table["second"] = 4
            model.append(nn.Identity())
        with applied.row("third"):
            model[2].third = 5
    assert (model[0].table.copies, model[1].table.copies) == (3, 1)
    model[1].between = 6  # the user's
    with applied.row("later"):
        model[1].table["later"] = 7
    assert [row.changes for row in applied.rows] == [1, 2, 1, 1]
    identity = model[2]
    assert applied.undo()
    assert (model[0].table, model[1].table) == ({"left": 1}, {"left": 2})
    assert model[1].between == 6 and not hasattr(identity, "third")


def test_rows_in_turn_give_back_a_tensor_that_one_of_them_has_moved() -> None:
    model: Any = nn.Module()
    model.positions, moved = torch.zeros(1), torch.zeros(1)
    applied = Applied(model)
    with applied.in_turn():
        with applied.row("first"):
            model.positions = moved
        with applied.row("second"):
            model.positions = None
    assert [row.changes for row in applied.rows] == [0, 1]
    assert applied.undo()
    assert model.positions is moved


def test_an_engine_that_is_dropped_without_being_closed_leaves_what_it_has_entered() -> None:
    undone: list[str] = []
    change = Change(lambda: lambda: undone.append("once"))
    first, second = Applied(), Applied()
    change.keep(first)
    change.keep(second)
    del first
    gc.collect()
    assert change.is_made and not undone
    second.undo()
    del second
    gc.collect()
    assert not change.is_made and undone == ["once"]
    assert not change.is_inside()
