"""A build without memory gives, tensor by tensor, what a plain build gives: bit for bit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from rapidformer.models.deferred import build_for_split, get_deferred, splits_weights
from rapidformer.models.recording import Recording, RecordingError, record, take
from rapidformer.models.weight_files import FileTensor

SPLIT = SimpleNamespace(
    world_size=2, deepspeed=None, zero_stage=3, tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1, expert_model_parallel_size=1, lora_rank=None, peft_config=None,
)  # fmt: skip


class Awkward(nn.Module):
    """Everything that a constructor may do with its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=2)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.copy = copy.deepcopy(self.layers[0])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.shift = nn.Parameter(torch.randn(4) * 3 + 1)
        nn.init.trunc_normal_(self.layers[0].weight, std=0.02)
        nn.init.orthogonal_(self.layers[1].weight)
        with torch.no_grad():
            self.layers[1].weight[1:3].mul_(self.scale.sum())
            self.layers[1].weight[:, 0] = torch.arange(6.0)
            self.layers[1].weight[4, 1:] = 0.25
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 3)]
        self.dropout = nn.Dropout(rates[-1])
        self.register_buffer("table", torch.outer(torch.arange(4.0), 0.5 ** torch.arange(3.0)))
        self.register_buffer("unsaved", torch.rand(3), persistent=False)
        self.loose = torch.ones(2, 2).tril()
        self.chosen = torch.nonzero(torch.tensor([0, 1, 1]))


def check(build: Callable[[], nn.Module]) -> nn.Module:
    """Compare parts of every tensor, ties and the state of the generator with a plain build's."""
    torch.manual_seed(3)
    plain = build()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    built = build_for_split(SPLIT, build)
    assert torch.equal(torch.get_rng_state(), state)
    deferred = get_deferred(built)
    assert deferred is not None
    expected = dict(plain.named_parameters(remove_duplicate=False))
    mine = dict(built.named_parameters(remove_duplicate=False))
    assert mine.keys() == expected.keys()
    assert dict(built.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    for name, parameter in expected.items():
        assert mine[name].is_meta and mine[name].requires_grad == parameter.requires_grad
        assert mine[name].dtype == parameter.dtype, name
        spans = [[(0, length)] for length in parameter.shape]
        if parameter.shape[0] > 4:
            spans[0] = [(1, 2), (3, parameter.shape[0])]
        part = deferred.read(name, spans)
        assert torch.equal(part, take(parameter.detach(), spans)), name
    for (name, buffer), (_, other) in zip(
        plain.named_buffers(), built.named_buffers(), strict=True
    ):
        assert torch.equal(buffer, other), name
    assert torch.equal(torch.get_rng_state(), state)
    return built


def test_whatever_a_constructor_does_is_repeated() -> None:
    built: Any = check(Awkward)
    plain = Awkward()
    assert built.dropout.p == plain.dropout.p
    assert torch.equal(built.loose, plain.loose) and torch.equal(built.chosen, plain.chosen)


def test_a_transformers_model_from_its_sizes() -> None:
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=4,
    )  # fmt: skip
    check(lambda: ViTForImageClassification(config))


def make_bert(folder: Path, dtype: torch.dtype = torch.float32) -> BertConfig:
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=40,
    )  # fmt: skip
    BertForMaskedLM(config).to(dtype).save_pretrained(folder, max_shard_size="10KB")
    return config


def load(folder: Path, kind: Any = BertForMaskedLM, **options: Any) -> nn.Module:
    options = {"ignore_mismatched_sizes": True, "dtype": torch.float32, **options}
    return kind.from_pretrained(folder, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_files_with_ties(tmp_path: Path, dtype: torch.dtype) -> None:
    make_bert(tmp_path, dtype)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check(lambda: load(tmp_path))


def test_a_new_head_is_drawn_as_one_process_draws_it(tmp_path: Path) -> None:
    make_bert(tmp_path)
    check(lambda: load(tmp_path, AutoModelForSequenceClassification, num_labels=3))


def test_weights_that_transformers_joins_and_renames(tmp_path: Path) -> None:
    """Mixtral's files hold each expert by itself, the model all of them in one tensor."""
    config = MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=3,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    check(lambda: load(tmp_path, MixtralForCausalLM))


def test_pickled_weights_are_loaded_whole(tmp_path: Path) -> None:
    config = make_bert(tmp_path)
    state = load(tmp_path).state_dict()
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    config.save_pretrained(tmp_path)
    built = build_for_split(SPLIT, lambda: load(tmp_path))
    assert get_deferred(built) is None
    assert all(torch.equal(value, state[name]) for name, value in built.state_dict().items())


def test_only_the_asked_part_of_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_bert(tmp_path)
    model = build_for_split(SPLIT, lambda: load(tmp_path))
    deferred = get_deferred(model)
    assert deferred is not None

    def refuse(self: FileTensor) -> torch.Tensor:
        raise AssertionError(f"{self.key} is read whole")

    monkeypatch.setattr(FileTensor, "__call__", refuse)
    weight = deferred.read("bert.embeddings.word_embeddings.weight", [[(10, 20)], [(0, 16)]])
    assert weight.shape == (10, 16)


def test_what_is_overwritten_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        layer = nn.Linear(8, 8)  # draws
        nn.init.normal_(layer.weight)
        return layer

    with record() as recording:
        layer = build()
    repeated = []
    repeat = Recording._repeat
    monkeypatch.setattr(
        Recording,
        "_repeat",
        lambda self, step, *rest: repeated.append(1) or repeat(self, step, *rest),
    )
    recording.read(layer.weight)
    assert len(repeated) == 1


def test_what_cannot_be_recorded_is_built_whole(caplog: pytest.LogCaptureFixture) -> None:
    """A generator of the user's own; told at debug level, and with the same numbers."""

    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
        return layer

    with record(), pytest.raises(RecordingError):
        build()
    torch.manual_seed(3)
    plain = build()
    torch.manual_seed(3)
    logging.getLogger("rapidformer").propagate = True
    with caplog.at_level(logging.DEBUG, logger="rapidformer"):
        built = build_for_split(SPLIT, build)
    assert get_deferred(built) is None
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), built.parameters(), strict=True)
    )
    assert "built whole on every process" in caplog.text


def test_a_real_error_is_the_plain_builds_own() -> None:
    with pytest.raises(ZeroDivisionError):
        build_for_split(SPLIT, lambda: nn.Linear(4, 1 // 0))


def test_weights_that_nothing_sets_are_not_invented() -> None:
    """An `empty` parameter has no recipe: the plain build decides what it holds."""

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    assert get_deferred(build_for_split(SPLIT, Lazy)) is None


def test_one_process_and_plain_copies_build_as_ever() -> None:
    assert not splits_weights(SimpleNamespace(**{**vars(SPLIT), "world_size": 1}))
    for stage in (0, 1, 2):  # they compute with whole weights, which --dynamic-shape tests first
        assert not splits_weights(SimpleNamespace(**{**vars(SPLIT), "zero_stage": stage}))
    assert not splits_weights(SimpleNamespace(**{**vars(SPLIT), "deepspeed": "file.json"}))
    assert splits_weights(
        SimpleNamespace(**{**vars(SPLIT), "zero_stage": 0, "tensor_model_parallel_size": 2})
    )
