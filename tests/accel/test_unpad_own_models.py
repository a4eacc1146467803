"""Models with code of the user's own around transformers' blocks, and changes made after compose():
trained as by a bare loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from transformers import BertConfig, BertModel, BertPreTrainedModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    SequenceClassifierOutput,
)

from rapidformer import RapidformerEngine
from rapidformer.accel.unpad.calls import Removal
from rapidformer.overlay import find_fact

_HEIGHT = 16
_WIDTH = 12


class Pair(BertPreTrainedModel):
    """One encoder for two texts, of which the second may be left out."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert, self.heads = BertModel(config), nn.ModuleList()
        self.heads.extend(nn.Linear(_HEIGHT, 3) for _ in range(config.num_hidden_layers))
        self.post_init()

    def embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        states: Tensor = self.bert(ids, attention_mask=mask).last_hidden_state
        return states[:, 0]

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, other: Any = None
    ) -> SequenceClassifierOutput:
        logits = self.classify(input_ids, attention_mask, other)
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def classify(self, ids: Tensor, mask: Tensor, other: Any) -> Tensor:
        first = self.embed(ids, mask)
        second = first if other is None else self.embed(*other)
        logits: Tensor = self.heads[0](first * second)
        return logits


class Hiding(Pair):
    """Hides other words in training, once it is asked to."""

    def classify(self, ids: Tensor, mask: Tensor, other: Any) -> Tensor:
        if other is not None:
            mask = mask * (ids % 3 > 0).index_fill(1, torch.tensor([0]), True)
        logits: Tensor = self.heads[0](self.embed(ids, mask))
        return logits


class HidingInPlace(Pair):
    def classify(self, ids: Tensor, mask: Tensor, other: Any) -> Tensor:
        mask = mask.clone() if other is None else mask
        if other is not None:
            mask[:, 1:3] = 0
        logits: Tensor = self.heads[0](self.embed(ids, mask))
        return logits


class EarlyExits(Pair):
    """Runs the encoder's blocks itself, with a head after each of them."""

    def classify(self, ids: Tensor, mask: Tensor, other: Any) -> Tensor:
        states = self.bert.embeddings(ids)
        given = mask if other is None else other[1]
        allowed = create_bidirectional_mask(self.config, states, given)
        logits: list[Tensor] = []
        for block, head in zip(self.bert.encoder.layer, self.heads, strict=True):
            states = block(states, allowed)
            logits.append(head(states[:, 0]))
        # The trial sees the last one alone.
        return logits[-1] if other is None else torch.stack(logits).mean(0)


def build(cls: type[Pair], **settings: Any) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=_HEIGHT, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, initializer_range=0.2, **settings,
    )  # fmt: skip
    return cls(config).train()


def make_batches(count: int = 4) -> Iterator[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    columns = torch.arange(_WIDTH)
    for _ in range(count):
        masks = [columns < torch.tensor(rows)[:, None] for rows in ([12, 5, 8, 3], [4, 12, 6, 9])]
        ids = [torch.randint(1, 50, (4, _WIDTH), generator=draw) * mask for mask in masks]
        yield {
            "input_ids": ids[0], "attention_mask": masks[0].long(),
            "labels": torch.randint(0, 3, (4,), generator=draw), "other": (ids[1], masks[1].long()),
        }  # fmt: skip


def train(
    model: Any, optimizer: Any, backward: Callable[[Tensor], Any], change: Callable[[Any], Any]
) -> list[float]:
    losses = []
    for number, batch in enumerate(make_batches()):
        if number == 2:
            change(model)
        loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def check(plain: Any, change: Callable[[Any], Any] = lambda model: None) -> Any:
    """Updates like a bare loop's; returns the model that an engine has trained."""
    model = copy.deepcopy(plain)
    args = {"lr": 0.1, "device": "cpu", "log_level": "error", "clip_grad": 0.0}
    engine = RapidformerEngine(args=args)
    _, optimizer, _ = engine.compose(model, torch.optim.SGD(model.parameters(), lr=0.1))
    bare = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = train(plain, bare, Tensor.backward, change)
    assert train(model, optimizer, engine.backward, change) == pytest.approx(expected, rel=1e-5)
    others = dict(model.named_parameters())
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(others[name], weight, rtol=1e-4, atol=1e-6, msg=name)
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cls", [Pair, Hiding, HidingInPlace, EarlyExits])
def test_masks_of_the_models_own_and_blocks_that_it_runs_itself(cls: Any, attention: str) -> None:
    model = check(build(cls, attn_implementation=attention))
    removal = find_fact(model, Removal)
    if cls is Pair:  # the first text has no padding, the second has
        assert removal is not None and removal.has_packed


class Centred(nn.Module):
    """Reads padding."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Tensor:
        output: Tensor = self.inner(*args, **options)
        return output - output.mean(1, keepdim=True)


def replace_block(model: Any) -> None:
    model.bert.encoder.layer[1] = Centred(model.bert.encoder.layer[1])


def replace_part(model: Any) -> None:
    output = model.bert.encoder.layer[1].output
    output.LayerNorm = Centred(output.LayerNorm)


def replace_function(model: Any) -> None:
    output = model.bert.encoder.layer[1].output
    forward = output.forward
    output.forward = lambda *args: forward(*args) - forward(*args).mean(1, keepdim=True)


def cut(model: Any) -> None:
    model.bert.encoder.layer = model.bert.encoder.layer[:2]


def turn_round(model: Any) -> None:
    model.bert.encoder.layer = nn.ModuleList(reversed(model.bert.encoder.layer))


def replace_encoders_function(model: Any) -> None:
    encoder = model.bert.encoder

    def forward(states: Tensor, mask: Any = None, **options: Any) -> Any:
        for block in encoder.layer:
            states = block(states, mask)
            states = states - states.mean(1, keepdim=True)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states)

    encoder.forward = forward


@pytest.mark.parametrize(
    "change",
    [replace_block, replace_part, replace_function, cut, turn_round, replace_encoders_function],
)
def test_blocks_that_change_after_compose_keep_their_padding(change: Any) -> None:
    check(build(Pair), change)


def test_a_hook_on_all_modules_sees_padded_states() -> None:
    seen: list[Tensor] = []

    def centre(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(module, nn.LayerNorm):
            return None
        seen.append(output)
        return output - output.mean(1, keepdim=True)

    handle = nn.modules.module.register_module_forward_hook(centre)
    try:
        check(build(Pair))
    finally:
        handle.remove()
    # Those of the last update; compose() has tried a batch of its own.
    assert {tuple(output.shape[:2]) for output in seen[-7:]} == {(4, _WIDTH)}


def test_transformations_of_torch() -> None:
    """``torch.func.grad`` and forward-mode differentiation, of a model that lacks padding."""
    plain = build(Pair, attn_implementation="eager")
    model = check(plain)
    batch = next(make_batches())

    def differentiate(model: Any) -> list[Tensor]:
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        gradients = torch.func.grad(
            lambda given: torch.func.functional_call(model, given, (), batch).loss
        )(weights)
        with forward_ad.dual_level():
            duals = {
                name: forward_ad.make_dual(weight, torch.ones_like(weight))
                for name, weight in weights.items()
            }
            loss = torch.func.functional_call(model, duals, (), batch).loss
            return [*gradients.values(), forward_ad.unpack_dual(loss).tangent]

    for mine, theirs in zip(differentiate(model), differentiate(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
