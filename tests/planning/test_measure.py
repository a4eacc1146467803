"""What is measured of a model without values, against sums by hand and against real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from rapidformer.config import arguments_from_mapping, resolve
from rapidformer.planning.measure import measure
from rapidformer.planning.parts import Cost, Shape
from rapidformer.planning.predict import predict
from rapidformer.planning.tracing import GpuTypes, Tracing
from tests.parity.harness import compose, run_own_loop
from tests.planning.states import make_training, measure_training


def follow(model: nn.Module, inputs: torch.Tensor, dtype: Any = None) -> Tracing:
    tracing = Tracing()
    types = GpuTypes(dtype, tracing.note_cast)
    with tracing, types:
        tracing.enter("forward")
        loss = model(inputs).sum()
        types.end_call()
        tracing.end_forward()
        tracing.enter("backward")
        loss.backward()
    return tracing


def test_saved_bytes_are_those_of_real_tensors() -> None:
    real = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    inputs = torch.randn(32, 64, requires_grad=True)
    weights = {p.untyped_storage().data_ptr() for p in real.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in {*weights, inputs.untyped_storage().data_ptr()}:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = real(inputs).sum()
    segment = follow(
        real.to("meta"), torch.empty_like(inputs, device="meta", requires_grad=True)
    ).segments["forward"]
    assert segment.saved == pytest.approx(sum(kept.values()), abs=3 * 512)  # and the loss itself
    assert loss.numel() == 1


def test_matrix_products_and_casts_of_a_layer_by_hand() -> None:
    layer = nn.Linear(64, 128, bias=False, device="meta")
    inputs = torch.empty(32, 64, device="meta", requires_grad=True)
    tracing = follow(layer, inputs, torch.bfloat16)
    forward, backward = tracing.segments["forward"], tracing.segments["backward"]
    assert forward.matrix_flops == 2 * 32 * 64 * 128
    assert backward.matrix_flops == 2 * forward.matrix_flops
    assert forward.casts == 2 * 64 * 128  # the weight in bf16, kept for the input's gradient


class _GroupedQueries(nn.Module):
    def forward(self, queries: torch.Tensor) -> torch.Tensor:
        keys = queries[:, :2]
        return functional.scaled_dot_product_attention(queries, keys, keys, enable_gqa=True)


def test_attention_whose_queries_share_keys_by_hand() -> None:
    queries = torch.empty(3, 8, 32, 16, device="meta", requires_grad=True)
    forward = follow(_GroupedQueries(), queries, torch.bfloat16).segments["forward"]
    assert forward.attention_flops == 2 * (2 * 3 * 8 * 32 * 32 * 16)


def test_a_cost_has_a_constant_a_slope_and_a_square() -> None:
    cost = Cost(constant=5, per_token=2, per_pair=0.5)
    assert cost.at(3, 4) == 5 + 2 * 12 + 0.5 * 48
    assert (cost + cost).at(3, 4) == 2 * cost.at(3, 4)


@pytest.fixture(scope="module")
def llama() -> Shape:
    return measure_training(make_training("llama", layers=4))


def test_parameters_and_blocks_are_counted_once(llama: Shape) -> None:
    model = make_training("llama", layers=4).build_model()
    assert llama.parameters == sum(p.numel() for p in model.parameters())
    assert [group.count for group in llama.blocks] == [4]
    assert llama.positions == model.config.max_position_embeddings


def plan(shape: Shape, ranks: int = 1, **settings: Any) -> Any:
    args = {"micro_batch_size": 64, "lr": 0.1, "cuda_graph": "off", **settings}
    resolved = resolve(arguments_from_mapping(args), world_size=ranks)
    return predict(shape, resolved, ranks).memory


def test_switches_save_what_they_promise(llama: Shape) -> None:
    plain = plan(llama)
    recomputed = plan(llama, checkpoint_activations=True)
    compiled = plan(llama, compile=True)
    offloaded = plan(llama, activation_offload=True)
    assert recomputed.activations < compiled.activations < plain.activations
    assert offloaded.activations < plain.activations and offloaded.host > 0
    assert plan(llama, micro_batch_size=32).activations == pytest.approx(
        plain.activations / 2, rel=0.02
    )
    assert plan(llama, context_parallel_size=2, ranks=2).activations < 0.6 * plain.activations
    assert plan(llama, optimizer_state_dtype="bf16").optimizer == plain.optimizer / 2
    sharded = plan(llama, ranks=4, zero_3_memory_optimization=True)
    assert sharded.optimizer == pytest.approx(plain.optimizer / 4, rel=0.02)
    assert plan(llama, ranks=4, zero_3_memory_optimization=True, cpu_offload=True).weights == 0


def test_a_loop_of_ones_own_is_followed_too(llama: Shape) -> None:
    training = make_training("llama", layers=4)
    args = resolve(arguments_from_mapping(training.get_settings({})))
    own = measure(args, lambda: run_own_loop(*compose(training, {})))
    assert own.parameters == llama.parameters and own.micro_batch_size == 2
    saved = [
        shape.blocks[0].part.saved.at(shape.rows, shape.length) / shape.length
        for shape in (own, llama)
    ]
    assert saved[0] == pytest.approx(saved[1], rel=0.1)
