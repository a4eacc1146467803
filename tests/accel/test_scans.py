"""Scans by products of chunks: those of transformers, and the recurrence that both compute."""

from __future__ import annotations

import copy
import functools
import gc
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5

from rapidformer.accel.scans.delta_rule import apply_delta_rule
from rapidformer.accel.scans.state_space import scan_states
from rapidformer.accel.unpad.calls import Removal
from rapidformer.compat import transformers_scans
from rapidformer.engine import RapidformerEngine
from rapidformer.overlay import find_fact, list_layers
from tests.accel.test_applied import look

LENGTHS = (3, 64, 150)
Scan = Callable[..., tuple[Tensor, Tensor]]


def scan_token_by_token(
    values: Tensor, dt: Tensor, rate: Tensor, keys: Tensor, queries: Tensor, _: int, *,
    D: Tensor, dt_bias: Tensor, initial_states: Tensor, **__: Any,  # noqa: N803
) -> tuple[Tensor, Tensor]:  # fmt: skip
    values, dt, rate, keys, queries, skip, bias, state = (
        t.double() for t in (values, dt, rate, keys, queries, D, dt_bias, initial_states)
    )
    dt, shared = functional.softplus(dt + bias), values.shape[2] // keys.shape[2]
    keys, queries = (part.repeat_interleave(shared, 2) for part in (keys, queries))
    outputs = []
    for token in range(values.shape[1]):
        taken = dt[:, token, :, None] * values[:, token]
        state = state * (dt[:, token] * rate).exp()[..., None, None]
        state = state + taken[..., None] * keys[:, token, :, None]
        read = (state * queries[:, token, :, None]).sum(-1)
        outputs.append(read + skip[:, None] * values[:, token])
    return torch.stack(outputs, 1), state


def apply_rule_token_by_token(
    query: Tensor, key: Tensor, value: Tensor, *,
    g: Tensor, beta: Tensor, initial_state: Tensor | None = None, **__: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = query.dtype
    query, key, value, g, beta = (t.double() for t in (query, key, value, g, beta))
    query, key = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (query, key))
    rows, tokens, heads, size = key.shape
    state = torch.zeros(rows, heads, size, value.shape[-1], dtype=torch.float64)
    state, outputs = state if initial_state is None else initial_state.double(), []
    for token in range(tokens):
        state = state * g[:, token].exp()[..., None, None]
        its_key = key[:, token, :, :, None]
        moved = (value[:, token] - (state * its_key).sum(2)) * beta[:, token, :, None]
        state = state + its_key * moved[:, :, None]
        outputs.append((state * query[:, token, :, :, None]).sum(2) * size**-0.5)
    return torch.stack(outputs, 1).to(dtype), state


def run(scan: Scan, inputs: list[Any], named: dict[str, Any]) -> list[Tensor]:
    """Outputs, first and second gradients."""
    inputs = [t.clone().requires_grad_() if isinstance(t, Tensor) else t for t in inputs]
    tensors = {k: v.clone().requires_grad_() for k, v in named.items() if isinstance(v, Tensor)}
    outputs = scan(*inputs, **(named | tensors))
    torch.manual_seed(1)
    loss = sum((output * torch.randn(output.shape)).sum() for output in outputs)
    learnt = [t for t in inputs if isinstance(t, Tensor)] + list(tensors.values())
    slopes = torch.autograd.grad(loss, learnt, create_graph=True)
    curves = torch.autograd.grad(sum(slope.square().sum() for slope in slopes), learnt)
    return [*outputs, *slopes, *curves]


def compare(mine: Scan, theirs: Scan, exact: Scan, inputs: list[Any], named: Any) -> None:
    """As exact as transformers' own, which rounds in another order."""
    expected = run(exact, inputs, named)
    errors = [
        [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
        for found in (run(mine, inputs, named), run(theirs, inputs, named))
    ]
    assert max(errors[0]) < max(5e-6, 2 * max(errors[1]))


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("groups", [1, 2])
def test_state_space(tokens: int, groups: int) -> None:
    torch.manual_seed(0)
    rows, heads, size, state = 2, 4, 5, 6
    inputs = [
        torch.randn(rows, tokens, heads, size), torch.randn(rows, tokens, heads),
        -3 * torch.rand(heads), torch.randn(rows, tokens, groups, state),
        torch.randn(rows, tokens, groups, state), 32,
    ]  # fmt: skip
    named = {
        "D": torch.randn(heads), "dt_bias": torch.randn(heads), "dt_softplus": True,
        "initial_states": torch.randn(rows, heads, size, state), "return_final_states": True,
    }  # fmt: skip
    compare(scan_states, modeling_mamba2.mamba2_chunk_scan, scan_token_by_token, inputs, named)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_delta_rule(tokens: int) -> None:
    torch.manual_seed(0)
    rows, heads, size, width = 2, 3, 6, 5
    inputs = [torch.randn(rows, tokens, heads, n) for n in (size, size, width)]
    named = {
        "g": -torch.rand(rows, tokens, heads), "beta": torch.rand(rows, tokens, heads),
        "initial_state": torch.randn(rows, heads, size, width), "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    theirs = modeling_qwen3_5.torch_chunk_gated_delta_rule
    compare(apply_delta_rule, theirs, apply_rule_token_by_token, inputs, named)


def test_rows_without_tokens_are_returned() -> None:
    values = torch.ones(2, 0, 3, 4)
    output = scan_states(values, values[..., 0], torch.ones(3), values, values, chunk_size=64)
    assert isinstance(output, Tensor) and output.shape == values.shape
    output, _ = apply_delta_rule(values, values, values, values[..., 0], values[..., 0])
    assert output.shape == values.shape


SIZES = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0,
}  # fmt: skip
STATES = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8}
DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba2": ("Mamba2Config", {
        "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
        "state_size": 8, "chunk_size": 8, "n_groups": 2, "pad_token_id": 0,
    }),
    "GraniteMoeHybrid": ("GraniteMoeHybridConfig", {
        **SIZES, **STATES, "shared_intermediate_size": 48, "num_local_experts": 0,
        "layer_types": ["mamba", "attention"],
    }),
    "FalconH1": ("FalconH1Config", {**SIZES, **STATES, "mamba_d_ssm": 32, "mamba_d_head": 8}),
    "Bamba": ("BambaConfig", {**SIZES, **STATES, "attn_layer_indices": [1]}),
    "NemotronH": ("NemotronHConfig", {
        **SIZES, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "head_dim": 8,
    }),
    "Zamba2": ("Zamba2Config", {
        **SIZES, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [1], "num_mem_blocks": 1, "mamba_d_state": 8, "n_mamba_heads": 4,
        "mamba_ngroups": 1, "chunk_size": 8,
    }),
    "OlmoHybrid": ("OlmoHybridConfig", {
        **SIZES, **DELTA, "linear_num_key_heads": 4, "eos_token_id": 2,
    }),
    "Qwen3_5": ("Qwen3_5TextConfig", {**SIZES, **DELTA}),
    "Qwen3Next": ("Qwen3NextConfig", {
        **SIZES, **DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }),
}  # fmt: skip


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    config, sizes = FAMILIES[family]
    settings = getattr(transformers, config)(**sizes)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(settings)
    return model


def build_batch(tokens: int = 70) -> dict[str, Tensor]:
    """A chunk has 64 tokens; after 61, there is just room for what a convolution looks back."""
    lengths = torch.tensor([tokens, 64, 61, 9]).clamp(max=tokens)
    ids, mask = torch.randint(3, 50, (4, tokens)), torch.arange(tokens) < lengths[:, None]
    mask = mask.long()
    return {
        "input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100),
    }  # fmt: skip


def compose(model: nn.Module) -> tuple[RapidformerEngine, Any]:
    engine = RapidformerEngine(args={"clip_grad": 0.0})
    composed, *_ = engine.compose(model, torch.optim.SGD(model.parameters(), 0.1))
    return engine, composed


def list_scanning(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "scans" in list_layers(module)]


def list_gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: p.grad.double() for name, p in named if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_models(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients of a model whose delta rule is exact: transformers' own is not."""
    model, batch = build(family), build_batch()
    plain = copy.deepcopy(model)
    engine, composed = compose(model)
    assert list_scanning(composed)
    assert "scans: layers without attention" in engine.explain()
    removal = find_fact(composed, Removal)
    assert removal is not None and removal.is_on
    loss = composed(**batch).loss
    engine.backward(loss)
    found = list_gradients(composed)
    module = sys.modules[type(plain).__module__]
    if hasattr(module, "torch_chunk_gated_delta_rule"):
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", apply_rule_token_by_token)
    plain.config.use_cache = False
    expected = plain(**batch).loss
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, gradient in list_gradients(plain).items():
        assert (found[name] - gradient).norm() < 2e-5 * gradient.norm() + 1e-9, name


def test_a_closed_model_is_the_plain_one_and_generates_the_same() -> None:
    model = build("FalconH1")
    before, prompt = look(model), build_batch()["input_ids"][:1]
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    engine, composed = compose(model)
    assert composed.generate(prompt, max_new_tokens=4, do_sample=False).equal(expected)
    engine.close()
    assert look(model) == before


def list_names() -> set[str]:
    gc.collect()
    return {name for name in vars(modeling_mamba2) if name.endswith("_of_rapidformer")}


@pytest.mark.parametrize("first", [0, 1])
def test_names_stay_in_a_file_while_a_layer_calls_them(first: int) -> None:
    """Layers of two engines, closed in either order, and of a copy that is used afterwards."""
    assert not list_names()
    opened = [compose(build("Mamba2")) for _ in range(2)]
    twin, ids = copy.deepcopy(opened[0][1]), build_batch()["input_ids"]
    assert list_names()
    opened[first][0].close()
    expected = opened[1 - first][1](input_ids=ids).logits
    opened[1 - first][0].close()
    assert twin(input_ids=ids).logits.equal(expected)
    assert list_names()
    del twin
    assert not list_names()


def test_kernels_of_a_package_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_scans, "find_spec", lambda name: name == "mamba_ssm" or None)
    assert not transformers_scans.list_scans(modeling_mamba2.Mamba2Mixer.forward)
    forward = modeling_qwen3_5.Qwen3_5GatedDeltaNet.forward
    assert transformers_scans.list_scans(forward) == ["torch_chunk_gated_delta_rule"]


@pytest.mark.parametrize(
    ("is_of_transformers", "reason"),
    [(True, "takes (hidden_states, dt)"), (False, "is not a function of transformers")],
)
def test_an_unknown_scan_is_left_alone_and_said(
    is_of_transformers: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @functools.wraps(modeling_mamba2.mamba2_chunk_scan)
    def own(*args: Any, **kwargs: Any) -> Any: ...

    def scan(hidden_states: Tensor, dt: Tensor) -> None: ...

    changed = FunctionType(scan.__code__, vars(modeling_mamba2))
    monkeypatch.setattr(
        modeling_mamba2, "mamba2_chunk_scan", changed if is_of_transformers else own
    )
    engine, model = compose(build("Mamba2"))
    assert not list_scanning(model)
    (line,) = (line for line in engine.explain().splitlines() if "scans" in line)
    assert "mamba2_chunk_scan" in line and reason in line
    engine.close()


def test_a_layer_of_an_own_class_is_changed_too() -> None:
    class Own(modeling_mamba2.Mamba2Mixer): ...

    model = build("Mamba2")
    for layer in model.modules():
        if type(layer) is modeling_mamba2.Mamba2Mixer:
            layer.__class__ = Own
    engine, model = compose(model)
    assert {type(layer).__name__ for layer in list_scanning(model)} == {"Own"}
    engine.close()


def test_what_a_script_puts_around_a_layer_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decorators, hooks of accelerate inside them, and functions replaced before and after."""
    calls: list[str] = []

    def note(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return noted

    class Hook(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append("hook")
            return args, kwargs

    compose(build("Mamba2"))[0].close()  # the layers' class is kept from here on
    mixer = modeling_mamba2.Mamba2Mixer
    monkeypatch.setattr(mixer, "forward", note("forward", mixer.forward))
    model = build("Mamba2")
    for layer in model.modules():
        if isinstance(layer, mixer):
            add_hook_to_module(layer.conv1d, Hook())
    engine, model = compose(model)
    convolve, scan = modeling_mamba2.causal_conv1d_fn, modeling_mamba2.mamba2_chunk_scan
    monkeypatch.setattr(modeling_mamba2, "causal_conv1d_fn", note("convolution", convolve))
    ids = build_batch()["input_ids"]
    model(input_ids=ids)
    layers = len(list_scanning(model))
    assert calls == ["forward", "hook", "convolution"] * layers and layers == 2
    monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", note("scan", scan))
    model(input_ids=ids)
    assert calls.count("scan") == layers
    engine.close()


@pytest.mark.parametrize(
    ("family", "scan"),
    [("Mamba2", "mamba2_chunk_scan"), ("Qwen3_5", "torch_chunk_gated_delta_rule")],
)
def test_a_scan_that_is_replaced_after_compose_gets_rows_with_their_padding(
    family: str, scan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row would take over the state of the one before it."""
    model, batch = build(family), build_batch()
    expected = model(**batch, use_cache=False).loss
    expected.backward()
    gradients = list_gradients(model)
    model.zero_grad()
    engine, model = compose(model)
    module = sys.modules[type(model).__module__]
    theirs, shapes = getattr(module, scan), list[torch.Size]()

    def own(*args: Any, **kwargs: Any) -> Any:
        shapes.append(args[0].shape)
        return theirs(*args, **kwargs)

    monkeypatch.setattr(module, scan, own)
    loss = model(**batch).loss
    loss.backward()
    assert {shape[0] for shape in shapes} == {len(batch["input_ids"])}
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, gradient in list_gradients(model).items():
        assert (gradient - gradients[name]).norm() < 1e-5 * gradients[name].norm() + 1e-9, name
    engine.close()


def test_forward_mode_differentiation_is_that_of_transformers() -> None:
    model = build("Qwen3_5")
    model.set_attn_implementation("eager")
    twin, ids = copy.deepcopy(model), build_batch()["input_ids"].clamp(min=3)
    engine, model = compose(model)

    def get_slope(model: nn.Module) -> Tensor:
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def run(weights: dict[str, Tensor]) -> Any:
            inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
            return torch.func.functional_call(model, weights, (), inputs).loss

        slope: Tensor = torch.func.jvp(run, (weights,), (weights,))[1]
        return slope

    torch.testing.assert_close(get_slope(model), get_slope(twin))
    engine.close()
