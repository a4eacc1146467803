"""Models built from one configuration object, such as a teacher and its student."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GPT2LMHeadModel, MixtralForCausalLM

from rapidformer import RapidformerEngine
from rapidformer.compat.transformers_models import get_expert_table
from rapidformer.models.plan import find_plan
from tests.accel.test_unpad import SMALL, Note, make_batch, run

MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}


@pytest.mark.parametrize("closed", [0, 1])
@pytest.mark.parametrize("kind", [GPT2LMHeadModel, MixtralForCausalLM])
def test_each_has_its_own_attention(kind: Any, closed: int) -> None:
    """Both run without padding, also after the other one's engine has closed."""
    config = AutoConfig.for_model(kind.config_class.model_type, **{**SMALL, **MIXTURE})
    models = [kind(config).eval() for _ in range(2)]
    batch, attention = make_batch(None), config._attn_implementation
    expected = [run(model, batch) for model in models]
    engines = [RapidformerEngine(args={"dynamic_shape": "on"}) for _ in models]
    for engine, model in zip(engines, models, strict=True):
        engine.compose(model, torch.optim.SGD(model.parameters(), 0.1))
    for still_open in (models, [models[1 - closed]]):
        for model in still_open:
            shapes: list[Any] = []
            hook = find_plan(model).get_blocks(model)[0].register_forward_hook(Note(shapes))
            for name, value in run(model, batch).items():
                wanted = expected[models.index(model)][name]
                torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-6)
            assert shapes == [(1, 21)], "21 real tokens of 44"
            hook.remove()
        engines[closed].close()
    engines[1 - closed].close()
    assert all(model.config is config for model in models)
    assert config._attn_implementation == attention


@pytest.mark.parametrize("closed", [0, 1])
def test_each_has_its_own_experts(closed: int) -> None:
    """So has a copy, which outlives both engines."""
    config = AutoConfig.for_model("mixtral", **{**SMALL, **MIXTURE})
    models = [MixtralForCausalLM(config).eval() for _ in range(2)]
    batch = make_batch(None)
    engines = [RapidformerEngine(args={"mixed_precision": "bf16"}) for _ in models]
    for engine, model in zip(engines, models, strict=True):
        engine.compose(model, torch.optim.SGD(model.parameters(), 0.1))
        assert model.config._experts_implementation == "rapidformer_grouped"
    twins, losses = copy.deepcopy(models), [model(**batch).loss for model in models]
    engines[closed].close()
    assert models[1 - closed](**batch).loss == losses[1 - closed]
    engines[1 - closed].close()
    assert config._experts_implementation == "grouped_mm"
    assert [twin(**batch).loss for twin in twins] == losses
    del twins
    gc.collect()
    assert "rapidformer_grouped" not in get_expert_table()
