"""What a recorded step has read: whatever of it changes later, the graph is not used for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer.accel.cuda_graph.inputs import NotRepeatableError
from rapidformer.accel.cuda_graph.replayed_code import ReplayedCode
from rapidformer.models.side_effects.examination import Examination


def make() -> Any:
    config = GPT2Config(
        n_embd=4, n_layer=1, n_head=1, n_positions=8, vocab_size=16, bos_token_id=0, eos_token_id=0
    )
    model: Any = GPT2LMHeadModel(config)
    model.config.aux, model.weights, model.hyper = 0.5, [0.5], {"aux": SimpleNamespace(rate=0.5)}
    return model


class Steps:
    def __init__(self) -> None:
        self.loss_fn: Callable[..., Any] = functional.mse_loss
        self.criterion: nn.Module = nn.MSELoss()

    def plain(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss

    def scaled(self, batch: Any, model: Any) -> Any:
        return model(**batch).loss * model.config.aux * model.hyper["aux"].rate

    def with_function(self, batch: Any, model: Any) -> Any:
        return self.loss_fn(model(**batch).logits, batch["targets"])

    def with_module(self, batch: Any, model: Any) -> Any:
        return self.criterion(model(**batch).logits, batch["targets"])


def own_loss(logits: Any, labels: Any, vocab_size: int, **more: Any) -> Any:
    return logits.mean()


CHANGES: dict[str, tuple[str, Callable[[Steps, Any], object]]] = {
    "an entry of the configuration": ("scaled", lambda s, m: setattr(m.config, "aux", 1.0)),
    "an item of a list": ("scaled", lambda s, m: m.weights.__setitem__(0, 1.0)),
    "one more item": ("scaled", lambda s, m: m.weights.append(1.0)),
    "a value in an object": ("scaled", lambda s, m: setattr(m.hyper["aux"], "rate", 1.0)),
    "the step's function": (
        "with_function", lambda s, m: setattr(s, "loss_fn", functional.l1_loss)
    ),
    "the step's criterion": ("with_module", lambda s, m: setattr(s, "criterion", nn.L1Loss())),
    "the model's loss": ("plain", lambda s, m: setattr(m, "loss_function", own_loss)),
    "the head": ("plain", lambda s, m: setattr(m, "lm_head", nn.Linear(4, 16, bias=False))),
    "a weight": (
        "plain", lambda s, m: setattr(m.lm_head, "weight", nn.Parameter(torch.zeros(16, 4)))
    ),
    "an activation": ("plain", lambda s, m: setattr(m.transformer.h[0].mlp, "act", nn.Tanh())),
    "a rate of dropout": ("plain", lambda s, m: setattr(m.transformer.drop, "p", 0.3)),
    "the mode of a part": ("plain", lambda s, m: m.transformer.eval()),
    "a key": ("scaled", lambda s, m: m.hyper.update(other=m.hyper.pop("aux"))),
    "a new attribute": ("plain", lambda s, m: setattr(m, "flag", True)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    method, change = CHANGES[name]
    steps, model = Steps(), make()
    code = Examination([getattr(steps, method)], model)
    assert code.effect is None
    before = code.describe()
    assert code.describe() == before
    change(steps, model)
    assert code.describe() != before
    assert code.find_changing(before, code.describe())


def test_a_state_that_comes_back_has_its_graph_again() -> None:
    model = make()
    code = Examination([Steps().plain], model)
    before = code.describe()
    model.eval()
    other = code.describe()
    model.train()
    model.config.aux = float("0.5")
    assert code.describe() == before
    model.eval()
    assert code.describe() == other


def test_adapters_that_are_merged_or_scaled() -> None:
    model = get_peft_model(make(), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    code = Examination([Steps().plain], model)
    seen = {code.describe()}
    model.base_model.model.transformer.h[0].attn.c_attn.scaling["default"] = 9.0
    seen.add(code.describe())
    model.merge_adapter()
    seen.add(code.describe())
    assert len(seen) == 3


def test_what_a_step_leaves_on_the_model_is_neither_kept_alive_nor_a_change() -> None:
    model = make()
    code = Examination([Steps().plain], model)
    numbers, left = set(), []
    for _ in range(3):
        logits = model(torch.tensor([[1, 2]])).logits
        model.last, model.seen = {"logits": logits}, [logits]
        left.append(weakref.ref(logits))
        del logits
        numbers.add(code.describe())
    assert len(numbers) == 1
    model.last = model.seen = None
    code.describe()  # before the next step
    gc.collect()
    assert [each() for each in left] == [None] * 3


def test_what_cannot_be_watched_is_refused() -> None:
    class Schedule:
        rate = 0.5

    def step(batch: Any, model: Any) -> Any:
        return model(**batch).loss * model.schedule.rate

    model = make()
    model.schedule = Schedule()
    assert "uses .schedule of a module, which may change unseen" in str(
        Examination([step], model).effect
    )


def test_a_hook_in_place_of_another_and_one_around_all_modules() -> None:
    def looks(module: Any, args: Any, output: Any) -> None:
        """Only looks."""

    model = make()
    looks.only_looks = True
    handle = model.lm_head.register_forward_hook(looks)
    code = ReplayedCode([Steps().plain], model)
    code.check_hooks([])
    handle.remove()
    handle = model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(NotRepeatableError, match="the hooks on lm_head"):
        code.check_hooks([])
    handle.remove()
    code.check_hooks([])
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.raises(NotRepeatableError, match="the hooks on all modules"):
            code.check_hooks([])
    finally:
        handle.remove()
