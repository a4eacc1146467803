"""LoRA under every layout == one process: adapters' gradients and weights; the rest stays frozen.

The models are those of the other tests with adapters on layers that are split by outputs, by inputs
or not at all. Every cell: ``python tests/parity/matrix.py llama-lora gpt2-lora …``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from rapidformer.checkpoint.tensors import StoredTensors
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.models.adapter_folder import replace_adapter
from rapidformer.verification.trace import Trace
from tests.parity.harness import (
    PADDED,
    PIPELINE,
    SHORT,
    TENSOR,
    UNPADDED,
    Case,
    Settings,
    Training,
    check,
    compose,
    make_adamw,
    run_one,
    run_updates,
    under,
    zero,
)
from tests.parity.models import build_model, build_rows, collate
from tests.parity.resuming import check_route
from tests.parity.under_deepspeed import LIMITS as DEEPSPEED_LIMITS
from tests.parity.under_deepspeed import build_case
from tests.processes import run_in_kept_processes

ADAPTERS = ("lora", "ia3", "prompt_encoder", "modules_to_save")


def check_adapters(world_size: int, cases: list[Case], *limits: object) -> None:
    for (training, _), traces in zip(cases, check(world_size, cases, *limits), strict=True):
        for trace in [run_one(training), *traces]:
            check_frozen(trace)


def check_frozen(trace: Trace) -> None:
    """What has no gradient is bit by bit what it was; what has one, is an adapter and moved."""
    trained = set(trace.gradients[0])
    assert trained and all(any(mark in name for mark in ADAPTERS) for name in trained)
    for name, weight in trace.weights.items():
        assert np.array_equal(weight, trace.start[name]) == (name not in trained), name


def test_adapters_of_replicas_and_of_sharded_models() -> None:
    short = {"rows": SHORT}
    check_adapters(
        2,
        [
            *under(zero(1, **UNPADDED), "gpt2-lora"),
            *under(zero(2), "llama-lora", make_optimizer=make_adamw),
            *under(
                zero(3, checkpoint_activations=True, **UNPADDED),
                "gpt2-lora",
                "experts-lora",
                **short,
            ),
            *under(zero(3, cpu_offload=True), "gpt2-dora", **short),
            *under(UNPADDED, "gpt2-ia3", "gpt2-prompt", **short),
            *under(zero(3, **UNPADDED), "gpt2-prefix", **short),
        ],
    )


def test_adapters_of_split_layers() -> None:
    """Fused and tied weights, few key heads, a head with an adapter, shared outputs (MLA).

    In stages, too, they are in tests/dialects/test_mindformers.py.
    """
    tensor, short = {TENSOR: 2}, {"rows": SHORT}
    check_adapters(
        2,
        [
            *under({**tensor, **UNPADDED}, "gpt2-lora"),
            *under(tensor, "llama-lora", **short),
            *under(tensor, "bert-lora", "deepseek-lora", **short),
            *under({**tensor, "sequence_parallel": True}, "llama-lora", **short),
        ],
    )


def test_adapters_of_stages_sequences_and_experts() -> None:
    staged, short = {PIPELINE: 2}, {"rows": SHORT}
    check_adapters(
        2,
        [
            *under(staged, "llama-lora"),
            *under({**staged, "pipeline_schedule": "zero-bubble"}, "gpt2-lora", layers=4, **short),
            *under({"context_parallel_size": 2}, "gpt2-lora", **short),
            *under({"expert_model_parallel_size": 2}, "mixtral-lora", **short),
        ],
    )


def test_adapters_under_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    case = build_case("gpt2-lora", {"zero_optimization": {"stage": 2}}, tmp_path)
    check_adapters(2, [case], DEEPSPEED_LIMITS)


def train_given(settings: Settings, folder: str) -> None:
    """A model that is peft's already, in one or several processes, exported with merged weights."""
    engine = RapidformerEngine(args={**PADDED, "optimizer": "sgd", "train_iters": 2, **settings})
    given = get_peft_model(
        build_model("gpt2"),
        LoraConfig(target_modules=["c_attn"], init_lora_weights=False, task_type="CAUSAL_LM"),
    )
    rows = build_rows("gpt2", 16)
    loader = engine.data.build_loader(rows, collate, shuffle=False, is_training=True)
    model, *_ = engine.compose(given)
    assert model is given
    model.train()
    run_updates(engine, model, loader)
    engine.export(folder)
    engine.close()


def test_a_peft_model_is_trained_in_stages_and_merged(tmp_path: Path) -> None:
    train_given({}, str(tmp_path / "one"))
    run_in_kept_processes(train_given, 2, {PIPELINE: 2}, str(tmp_path / "two"))
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and not any("lora" in name for name in one)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-6)


class Adapted:
    """Reads the folder that was exported into a model that is built again."""

    @staticmethod
    def from_pretrained(folder: str) -> nn.Module:
        model = build_model("gpt2-lora")
        replace_adapter(model, folder)
        return model


def test_an_adapter_resumes_on_any_layout(tmp_path: Path) -> None:
    route = [(2, {TENSOR: 2}), (2, {PIPELINE: 2})]
    check_route(Training("gpt2-lora", rows=8), route, Adapted, tmp_path, is_exported=False)
    names = StoredTensors(tmp_path / "0" / "iter_0000001" / "state").kinds
    assert names and all("lora" in name for name in names), "the frozen weights are left out"


def refuse(cases: list[Case]) -> list[str]:
    messages = []
    for case in cases:
        with pytest.raises(RapidformerError) as caught:
            compose(*case)
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_split_is_refused_by_name() -> None:
    expected = [
        ("gpt2-dora", TENSOR, "cannot split the DoRA adapter of transformer.h.0.attn.c_attn"),
        ("mixtral-lora", TENSOR, "the adapter of model.layers.0.mlp.gate, which changes a param"),
        ("experts-lora", "expert_model_parallel_size", "adapter of model.layers.0.mlp.experts"),
        ("gpt2-ia3", TENSOR, "cannot split the IA3 adapter of transformer.h.0.attn.c_attn"),
        ("gpt2-prompt", PIPELINE, "cannot be combined with PROMPT_TUNING: its learned tokens"),
        ("gpt2-prefix", "context_parallel_size", "cannot be combined with PREFIX_TUNING"),
    ]
    cases = [(Training(model), {setting: 2}) for model, setting, _ in expected]
    for messages in run_in_kept_processes(refuse, 2, cases):
        for message, (model, _, text) in zip(messages, expected, strict=True):
            assert text in message, (model, message)
