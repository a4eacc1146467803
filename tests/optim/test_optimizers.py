"""Optimizers: groups, falling losses, and a state that goes on bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon
from transformers import BertConfig, BertForSequenceClassification

from rapidformer.config import Settings
from rapidformer.errors import ConfigurationError
from rapidformer.optim.bf16_adamw import Bf16AdamW
from rapidformer.optim.optimizers import CombinedOptimizer, build_optimizer, group_parameters

from .rig import describe_optimizer

KINDS = ["adam", "adamw", "bf16", "sgd", "adafactor", "muon"]
RATES = dict.fromkeys(KINDS, 3e-2) | {"sgd": 1e-1}


class Small(nn.Module):
    """An embedding, a block, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(self.norm(hidden))


def make(kind: str) -> tuple[Small, torch.optim.Optimizer, Callable[[], float]]:
    torch.manual_seed(0)
    model = Small()
    optimizer = build_optimizer(model, describe_optimizer(kind, lr=RATES[kind]))
    ids, labels = torch.arange(10), torch.arange(10) % 3

    def step() -> float:
        loss = nn.functional.cross_entropy(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, optimizer, step


@pytest.mark.parametrize("kind", KINDS)
def test_loss_falls(kind: str) -> None:
    _, _, step = make(kind)
    losses = [step() for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        ("adam", AdamW),
        ("adamw", AdamW),
        ("bf16", Bf16AdamW),
        ("sgd", SGD),
        ("adafactor", Adafactor),
    ],
)
def test_kind_is_torchs_own(kind: str, cls: type) -> None:
    _, optimizer, _ = make(kind)
    assert type(optimizer) is cls


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_held_exactly_once(kind: str) -> None:
    model, optimizer, _ = make(kind)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_no_decay_on_biases_and_norms(kind: str) -> None:
    model, optimizer, _ = make(kind)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        is_spared = name.endswith("bias") or "norm" in name
        assert decay[id(parameter)] == (0.0 if is_spared else 0.01), name


def test_groups_of_a_real_model() -> None:
    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=8,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    decayed, spared = group_parameters(model, 0.3)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    spared_names = {names[id(p)] for p in spared["params"]}
    assert spared_names == {
        name for name in names.values() if name.endswith(".bias") or "LayerNorm" in name
    }


def test_frozen_parameters_are_left_out_and_empty_groups_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    (group,) = group_parameters(model, 0.1)
    assert [id(p) for p in group["params"]] == [id(model[1].weight)]


def test_tied_weights_are_held_once() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    (group,) = group_parameters(model, 0.1)
    assert len(group["params"]) == 1


def test_settings_arrive() -> None:
    settings = Settings(lr=0.5, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-4, weight_decay=0.2)
    group = build_optimizer(nn.Linear(2, 2), settings).param_groups[0]
    assert group["betas"] == (0.8, 0.95)
    assert (group["lr"], group["eps"], group["weight_decay"]) == (0.5, 1e-4, 0.2)
    sgd = build_optimizer(nn.Linear(2, 2), Settings(optimizer="sgd", lr=1, sgd_momentum=0.3))
    assert sgd.param_groups[0]["momentum"] == 0.3


def test_weight_decay_is_decoupled() -> None:
    """Without a gradient signal, AdamW shrinks weights by lr x decay and leaves biases alone."""
    model = nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    optimizer = build_optimizer(model, Settings(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(model.weight, before["weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(model.bias, before["bias"])


def test_missing_learning_rate_is_said() -> None:
    with pytest.raises(ConfigurationError, match="--lr is missing"):
        build_optimizer(nn.Linear(2, 2), Settings())


# ---- Muon with AdamW ---------------------------------------------------------------------------


def test_muon_turns_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model, optimizer, _ = make("muon")
    assert isinstance(optimizer, CombinedOptimizer)
    muon, adamw = optimizer._parts
    assert isinstance(muon, Muon)
    assert isinstance(adamw, AdamW)
    turned = {id(p) for group in muon.param_groups for p in group["params"]}
    assert {id(layer.weight) for layer in model.layers} <= turned
    rest = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert id(model.embedding.weight) in rest
    assert {id(model.norm.weight), id(model.norm.bias), id(model.head.bias)} <= rest


def test_muon_leaves_the_head_to_adamw() -> None:
    """'Muon turns matrices inside the blocks and leaves everything else to AdamW.'"""
    model, optimizer, _ = make("muon")
    assert isinstance(optimizer, CombinedOptimizer)
    turned = {id(p) for group in optimizer._parts[0].param_groups for p in group["params"]}
    assert id(model.head.weight) not in turned


@pytest.mark.parametrize("kind", KINDS)
def test_state_continues_bit_for_bit(kind: str) -> None:
    model, optimizer, step = make(kind)
    for _ in range(4):
        step()
    resumed_model, resumed, resumed_step = make(kind)
    resumed_model.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [step() for _ in range(4)] == [resumed_step() for _ in range(4)]
    for name, value in model.state_dict().items():
        assert torch.equal(value, resumed_model.state_dict()[name]), name


def test_parts_share_rate_and_state_also_after_loading() -> None:
    _, optimizer, step = make("muon")
    step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert isinstance(optimizer, CombinedOptimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.125
    for part in optimizer._parts:
        assert all(group["lr"] == 0.125 for group in part.param_groups)
        assert part.state is optimizer.state
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in optimizer.state} == set(held)


def test_muon_needs_matrices() -> None:
    with pytest.raises(ConfigurationError, match="no weight matrices in its blocks; use adam"):
        build_optimizer(nn.LayerNorm(4), Settings(optimizer="muon", lr=1))
