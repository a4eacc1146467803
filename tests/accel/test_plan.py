"""Where a model's blocks are found, for each family and for models of the user's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertGenerationConfig,
    BertGenerationDecoder,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SwinConfig,
    SwinForImageClassification,
    XLMConfig,
    XLMWithLMHeadModel,
)

from rapidformer.errors import ModelError
from rapidformer.models.own_loss import shifts_labels
from rapidformer.models.plan import ModelPlan, find_plan
from tests.parity.own_models import PlainModel

from .models import make


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("bert", [f"bert.encoder.layer.{i}" for i in range(3)]),
        ("gpt2", [f"transformer.h.{i}" for i in range(3)]),
        (
            "t5",
            [f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(3)],
        ),
        ("llama", [f"model.layers.{i}" for i in range(3)]),
        ("custom", [f"layers.{i}" for i in range(3)]),
    ],
)
def test_blocks(family: str, names: list[str]) -> None:
    model = make(family)
    plan = find_plan(model)
    assert list(plan.blocks) == names
    assert [id(block) for block in plan.get_blocks(model)] == [
        id(model.get_submodule(name)) for name in names
    ]


def test_blocks_of_vit() -> None:
    """Their place in the model differs between versions of transformers; their kind does not."""
    model = make("vit")
    blocks = find_plan(model).get_blocks(model)
    assert [type(block).__name__ for block in blocks] == ["ViTLayer"] * 3


def test_of_blocks_inside_blocks_the_inner_ones_count() -> None:
    """Swin marks both its stages and their blocks."""
    config = SwinConfig(image_size=32, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4)
    plan = find_plan(SwinForImageClassification(config))
    stages = [f"swin.encoder.layers.{stage}.blocks" for stage in range(2)]
    assert plan.blocks == tuple(f"{stage}.{i}" for stage in stages for i in range(2))


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("bert", ()),
        ("gpt2", (("transformer.wte.weight", "lm_head.weight"),)),
        ("llama", ()),
        ("custom", ()),
    ],
)
def test_tied_weights(family: str, tied: tuple[tuple[str, ...], ...]) -> None:
    assert find_plan(make(family)).tied == tied


def test_tied_weights_of_t5() -> None:
    (group,) = find_plan(make("t5")).tied
    assert {"shared.weight", "encoder.embed_tokens.weight", "lm_head.weight"} <= set(group)


class Planned(PlainModel):
    answer: Any = None

    def rapidformer_plan(self) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ({"blocks": "layers"}, ["layers.0", "layers.1", "layers.2"]),
        ({"blocks": ["layers.2", "head"]}, ["layers.2", "head"]),
        (ModelPlan(blocks=("layers.1",)), ["layers.1"]),
        ({"blocks": []}, []),
        ({}, ["layers.0", "layers.1", "layers.2"]),  # not said: found
    ],
    ids=str,
)
def test_models_own_plan(answer: Any, names: list[str]) -> None:
    model = Planned(layers=3)
    model.answer = answer
    plan = find_plan(model)
    assert list(plan.blocks) == names
    assert plan.source == "the model's rapidformer_plan()"


def test_own_plan_with_a_name_that_is_not_there() -> None:
    model = Planned(layers=3)
    model.answer = {"blocks": ["layers", "block"]}
    with pytest.raises(ModelError, match=r"names modules that the model does not have: block\."):
        find_plan(model)


def test_the_list_with_the_most_weights_has_the_blocks() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(20))
            self.unequal = nn.ModuleList(nn.Linear(4, 4 + i) for i in range(9))
            self.activations = nn.ModuleList(nn.ReLU() for _ in range(9))
            # Funnel's: the outer list's members are never called.
            self.nested = nn.ModuleList(nn.ModuleList([nn.Linear(5, 5)]) for _ in range(9))
            self.blocks = nn.Sequential(Block(), Block())

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 9)) for _ in range(6))

    assert list(find_plan(Towers()).blocks) == ["blocks.0", "blocks.1"]


class Layer(nn.Module):
    """A dense layer, or one with experts."""

    def __init__(self, experts: Any = None, width: int = 4) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1)
        self.norm = nn.LayerNorm(width)
        if experts is None:
            self.feed_forward: nn.Module = feed_forward(width)
        else:
            self.router, self.experts = nn.Linear(width, 6), experts
            self.shared_expert = feed_forward(width)


class ExpertLayer(Layer):
    pass


class Mixer(nn.Module):
    """Has nothing in common with the layers that it takes turns with, like Jamba's Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.experts = nn.Linear(4, 4), experts_in_list()


def feed_forward(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 9), nn.ReLU(), nn.Linear(9, width))


def experts_in_list() -> nn.Module:
    return nn.ModuleList(feed_forward() for _ in range(6))


def experts_by_name() -> nn.Module:
    return nn.ModuleDict({f"expert_{i}": feed_forward() for i in range(6)})


@pytest.mark.parametrize(
    "layers",
    [
        [Layer(), Layer(experts_in_list()), Layer(), Layer(experts_in_list())],
        [Layer(), Layer(experts_by_name()), Layer(), Layer(experts_by_name())],
        [Layer(), ExpertLayer(experts_in_list())],
        [Layer(), ExpertLayer(experts_in_list()), ExpertLayer(experts_in_list())],
        [Mixer(), Layer(), Mixer(), Layer()],
    ],
    ids=["list", "names", "two classes", "first dense", "nothing in common"],
)
def test_layers_with_experts_take_turns_with_dense_ones(layers: list[nn.Module]) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(90, 4), "layers": nn.ModuleList(layers)})
    assert list(find_plan(model).blocks) == [f"layers.{i}" for i in range(len(layers))]


@pytest.mark.parametrize("widths", [(4, 8), (4, 4)])
def test_parts_of_a_model_are_not_its_blocks(widths: tuple[int, int]) -> None:
    """An embedding, an encoder and a head in a row; stages of a hierarchical encoder."""

    class Stage(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Layer(width=width) for _ in range(depth))

    stages = nn.ModuleList(Stage(width, depth) for width, depth in zip(widths, (2, 3), strict=True))
    encoder = nn.ModuleDict({"stages": stages})
    model = nn.Sequential(nn.ModuleDict({"words": nn.Embedding(9, 4)}), encoder, nn.Linear(4, 9))
    blocks = [f"1.stages.{i}.blocks.{j}" for i, depth in enumerate((2, 3)) for j in range(depth)]
    assert list(find_plan(model).blocks) == blocks


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 400), nn.Embedding(400, 4)], ids=["heads", "tables"]
)
def test_blocks_may_be_smaller_than_heads_and_tables(layer: nn.Module) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([layer, copy.deepcopy(layer)])})
    assert list(find_plan(model).blocks) == ["layers.0", "layers.1"]  # there is nothing else
    model["blocks"] = nn.ModuleList(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4)) for _ in "ab")
    assert list(find_plan(model).blocks) == ["blocks.0", "blocks.1"]


def test_both_stacks_of_torchs_own_transformer_have_blocks() -> None:
    model = nn.Transformer(4, 1, num_encoder_layers=3, num_decoder_layers=2, dim_feedforward=4)
    expected = [*(f"encoder.layers.{i}" for i in range(3)), "decoder.layers.0", "decoder.layers.1"]
    assert list(find_plan(model).blocks) == expected


def test_sequential_at_the_root() -> None:
    assert list(find_plan(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))).blocks) == ["0", "1"]


def test_a_list_of_blocks_may_have_gaps() -> None:
    """Informer's layers that shorten a sequence: the last place is None."""
    layers = [PlainModel().layers[0], None, PlainModel().layers[0]]
    assert find_plan(nn.ModuleList(layers)).blocks == ("0", "2")


def test_model_without_blocks() -> None:
    plan = find_plan(nn.Linear(2, 2))
    assert plan.blocks == ()
    assert plan.source == "no repeated blocks found"


def test_shared_parameter_of_a_users_model_is_found() -> None:
    model = PlainModel()
    model.head.weight = model.embedding.weight
    assert find_plan(model).tied == (("embedding.weight", "head.weight"),)


def test_subclasses_and_adapters_shift_labels_as_their_model_does() -> None:
    from peft import LoraConfig, get_peft_model

    model = make("llama")
    model.__class__ = type("Mine", (type(model),), {})
    assert shifts_labels(model)
    for family, is_shifted in (("llama", True), ("bert", False)):
        # No task type: peft's class says nothing about the model.
        adapted = get_peft_model(make(family), LoraConfig(target_modules="all-linear"))
        assert shifts_labels(adapted) is is_shifted


def test_a_multimodal_decoder_shifts_labels() -> None:
    """Its class is named like T5's: the configuration tells whether there is an encoder."""
    small = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    }  # fmt: skip
    config = LlavaConfig(vision_config=small, text_config={**small, "model_type": "llama"})
    with torch.device("meta"):
        assert shifts_labels(LlavaForConditionalGeneration(config))


def test_the_loss_that_a_model_calls_decides_whether_labels_shift() -> None:
    """Whatever the class is called: transformers' own decoders have other names too."""
    small = {"vocab_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    config = BertGenerationConfig(hidden_size=8, intermediate_size=8, is_decoder=True, **small)
    with torch.device("meta"):
        assert shifts_labels(BertGenerationDecoder(config))
        unshifted = XLMWithLMHeadModel(XLMConfig(emb_dim=8, n_layers=1, n_heads=1))
    assert not shifts_labels(unshifted), "it compares each position with its own label"
    model = make("llama")
    model.loss_type = "ForMaskedLM"
    assert not shifts_labels(model)


@pytest.mark.parametrize(
    ("family", "is_shifted"),
    [("gpt2", True), ("llama", True), ("bert", False), ("t5", False), ("custom", False)],
)
def test_which_models_shift_labels(family: str, is_shifted: bool) -> None:
    model = make(family)
    assert shifts_labels(model) is is_shifted
    if family in ("gpt2", "llama"):
        ids = torch.arange(1, 7)[None]
        first_ignored = ids.clone()
        first_ignored[:, 0] = -100
        with torch.no_grad():
            losses = [model(input_ids=ids, labels=x).loss for x in (ids, first_ignored)]
        assert torch.equal(*losses), "the first label has no part in the loss"


def test_a_plan_says_where_tokens_meet_and_which_modules_are_experts() -> None:
    class Own(nn.Sequential):
        def rapidformer_plan(self) -> dict[str, object]:
            return {
                "blocks": ["0", "1"], "has_split_attention": True,
                "token_dims": {"rotation": 2}, "experts": "*.experts",
            }  # fmt: skip

    plan = find_plan(Own(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert plan.has_split_attention
    assert plan.token_dims == {"rotation": 2}
    assert plan.experts == ("*.experts",)
