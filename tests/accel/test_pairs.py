"""Pairs of rows, composed: what is applied, and what ``explain`` says of it, is what rows predict.

Rows that are on by themselves are on in each of these models, as far as these have what they
change. So every row that one machine can run meets every other one. ``tests/config/test_pairs.py``
has the rest: other devices, and what is refused before there is a model.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rapidformer.config.explain import Answer, explain
from rapidformer.config.parse import arguments_from_mapping
from rapidformer.config.switches import Situation, Switch, get_switch
from rapidformer.config.validate import find_problems
from rapidformer.engine import RapidformerEngine
from rapidformer.engine.unused_settings import find_idle_settings
from rapidformer.errors import ConfigurationError
from tests.accel.test_applied import check_plain, look
from tests.parity.models import build_model
from tests.processes import run_in_kept_processes

pytestmark = pytest.mark.slow
Settings = dict[str, Any]

ALONE: dict[str, Settings] = {
    "recompute": {"checkpoint_activations": True},
    "compilation": {"compile": True, "compile_backend": "eager"},
    "fused loss": {"fused_loss": "on"},
    "dynamic shape": {"dynamic_shape": "on"},
    "attention": {"attention": "eager"},
    "precision": {"mixed_precision": "bf16"},
    "bf16 moments": {"optimizer_state_dtype": "bf16"},
    "Muon": {"optimizer": "muon"},
    "Adafactor": {"optimizer": "adafactor"},
    "token budget": {"tokens_per_micro_batch": 64},
    # Without effect here.
    "activation offload": {"activation_offload": True},
    "ZeRO": {"zero_1_memory_optimization": True},
    "CPU offload": {"cpu_offload": True},
}
SHARED: dict[str, Settings] = {
    "data parallelism": {},
    "ZeRO": {"zero_2_memory_optimization": True},
    "CPU offload": {"cpu_offload": True},
    "hybrid sharding": {"zero_3_memory_optimization": True, "hybrid_sharding_size": 1},
    "tensor parallelism": {"tensor_model_parallel_size": 2},
    "sequence parallelism": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context parallelism": {"context_parallel_size": 2},
    "expert parallelism": {"expert_model_parallel_size": 2},
}
BASE: Settings = {
    "lr": 0.1, "device": "cpu", "log_level": "error", "micro_batch_size": 2,
    "dynamic_shape": "off",  # its proof takes longer than all the rest: it is a row of ``ALONE``
}  # fmt: skip
MODELS = {"gpt2-lora", "mixtral", "t5", "deberta", "gpt2"}
"""What rows without a flag are about: adapters, experts, a bias, scores of positions."""
OPTIMIZERS = {"bf16 moments": "Bf16AdamW", "Muon": "CombinedOptimizer", "Adafactor": "Adafactor"}


def try_out(name: str, settings: Settings, *, is_training: bool = True) -> None:
    """Compose a model; what the rows foretell comes true, or the model says why not."""
    given = {**BASE, **settings}
    model = build_model(name, layers=2 if "pipeline_model_parallel_size" in settings else 1)
    before, refused = look(model), ""
    engine = RapidformerEngine(args=given)
    place = Situation(
        device="cpu", precision=engine.runtime.precision.name, is_training=is_training
    )
    foretold = {answer.name: answer for answer in explain(engine.args, place)}
    try:
        compose(engine, model, is_training=is_training)
    except ConfigurationError as error:
        refused = str(error)
    if refused:
        asked = [get_switch(each) for each in foretold if get_switch(each).is_asked(engine.args)]
        assert any(row.describe(engine.args) in refused for row in asked), refused
    else:
        check_applied(engine, foretold)
    engine.close()
    check_plain(model, before)


def compose(engine: RapidformerEngine, model: Any, *, is_training: bool) -> None:
    if is_training:
        engine.compose(model)
    else:
        engine.model.compose_for_evaluation(model)


def check_applied(engine: RapidformerEngine, foretold: dict[str, Answer]) -> None:
    parallelized = engine.model.parallelized
    found = {answer.name: answer for answer in parallelized.explain(engine.args)}
    assert sorted(found) == sorted(foretold)
    rows = {row.name: row for row in parallelized.applied.rows}
    expected = {name for name, answer in foretold.items() if answer.state == "on"}
    assert {n for n in expected if get_switch(n).module} == {n for n in rows if not rows[n].is_part}
    assert set(rows) <= expected, f"applied, and not foretold: {set(rows) - expected}"
    for name, answer in found.items():
        row = get_switch(name)
        if name not in expected:
            assert answer == foretold[name]
            if row.is_asked(engine.args):
                check_said(row, engine)
        elif row.is_asked(engine.args):
            # It works, or this model has a reason of its own.
            has_reason = row.module and rows[name].find_obstacle() is not None
            assert answer.state == "on" or has_reason, answer
            if engine.updates.optimizer is not None and name in OPTIMIZERS:
                kinds = [cls.__name__ for cls in type(engine.updates.optimizer).__mro__]
                assert OPTIMIZERS[name] in kinds
        else:
            assert answer.state in ("on", "not applicable")


def check_said(row: Switch, engine: RapidformerEngine) -> None:
    """What was asked for and is off was said at the start, unless something else does it."""
    situation = engine.model.parallelized.situation
    obstacle = row.find_obstacle(engine.args, situation)
    assert obstacle is not None and obstacle.if_asked != "refused"
    lines = find_idle_settings(engine.args, situation)
    is_said = any(line.startswith(row.describe(engine.args)) for line in lines)
    assert is_said == (obstacle.if_asked == "warned of"), (row.name, lines)


def combine(one: Settings, other: Settings) -> Settings | None:
    """The settings of both; None if they cannot be given together."""
    both = {**one, **other}
    if any(both[name] != value for name, value in one.items()):
        return None
    # The one that is asked for here needs sdpa attention, as its refusal says.
    if both.get("attention") == "eager" and both.get("dynamic_shape") == "on":
        both["dynamic_shape"] = "auto"
    return both


def is_refused(settings: Settings, world_size: int) -> bool:
    args = arguments_from_mapping(settings).replace("test", world_size=world_size)
    return bool(find_problems(args))


@pytest.mark.usefixtures("emulated")
def test_every_pair_in_one_process() -> None:
    torch.set_num_threads(1)
    for one, other in itertools.combinations(ALONE.values(), 2):
        settings = combine(one, other)
        if settings is not None and not is_refused(settings, 1):
            try_out("gpt2", settings)


@pytest.mark.usefixtures("emulated")
def test_every_row_with_what_models_have() -> None:
    torch.set_num_threads(1)
    for name, settings in itertools.product(sorted(MODELS - {"gpt2"}), ALONE.values()):
        try_out(name, {"mixed_precision": "bf16", **settings})


@pytest.mark.usefixtures("emulated")
def test_every_row_in_prediction() -> None:
    torch.set_num_threads(1)
    for settings in ALONE.values():
        try_out("gpt2", {"mixed_precision": "bf16", **settings}, is_training=False)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPIDFORMER_EMULATE_16_BIT", "1")


# ---- two ranks -----------------------------------------------------------------------------------


def try_all(cases: list[tuple[str, Settings, bool]]) -> int:
    torch.set_num_threads(1)
    for name, settings, is_training in cases:
        try_out(name, settings, is_training=is_training)
    return len(cases)


def list_shared() -> list[tuple[str, Settings, bool]]:
    """Each way to share with some of the rest, so that all of these meet some."""
    cases, others = [], list(ALONE.values())
    for number, (name, layout) in enumerate(SHARED.items()):
        model = "mixtral" if name == "expert parallelism" else "gpt2"
        for offset in range(0, len(others), 2):
            settings = combine(layout, others[(number + offset) % len(others)])
            if settings is not None and not is_refused(settings, 2):
                cases.append((model, settings, True))
        cases.append((model, layout, False))
    return cases


def test_ways_to_share_a_model_on_two_ranks() -> None:
    cases = list_shared()
    assert len(cases) > 50
    assert run_in_kept_processes(try_all, 2, cases) == [len(cases)] * 2
