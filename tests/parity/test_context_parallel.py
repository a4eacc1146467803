"""Sequences shared over processes == one process: losses, every gradient, updated weights, ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rapidformer.accel.context.exchanged_attention import get_repeats
from rapidformer.accel.split.on_demand import WholeOnDemand
from rapidformer.compat.torch_compile import count_graphs
from rapidformer.config import arguments_from_mapping
from rapidformer.config.validate import find_problems
from rapidformer.data.batch import BatchInfo
from rapidformer.dist.context_region import ContextRegion
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.tasks.text.packed_attention import apply_packed_attention, get_inputs
from rapidformer.training.meter import Meter
from rapidformer.verification.recorder import collect_gradients
from tests.parity.generating import generate
from tests.parity.harness import (
    PADDED,
    UNPADDED,
    Case,
    Settings,
    check,
    keep_rate,
    make_adamw,
    make_sgd,
    train,
    under,
)
from tests.parity.hooks import only_looking
from tests.parity.models import build_model, build_rows, collate
from tests.processes import run_in_kept_processes

ROWS = 4
CONTEXT: Settings = {"context_parallel_size": 2, "global_batch_size": ROWS}
FUSED: Settings = {"fused_loss": "on"}


def under_context(settings: Settings, *models: str, updates: int = 1, **more: Any) -> list[Case]:
    return under(settings, *models, rows=updates * ROWS, global_batch_size=ROWS, **more)


def test_two_processes_that_share_sequences_equal_one() -> None:
    """Odd lengths, padding, labels that meet at the cut, tied weights, accumulation."""
    lengths = [len(row["input_ids"]) for row in build_rows("llama", 40)]
    assert any(length % 2 for length in lengths)
    ten = under_context(CONTEXT, "llama", updates=10)
    padded = under_context(CONTEXT, "gpt2", "gpt", "own")
    # bert and llama without padding are in test_unpad.py.
    unpadded = under_context({**CONTEXT, **UNPADDED}, "bert", "mistral-narrow")
    fused = under_context({**CONTEXT, **UNPADDED, **FUSED}, "bert-mlm", "qwen3")
    check(2, ten + padded + unpadded + fused)


def test_shared_sequences_under_data_parallelism() -> None:
    """Rows are counted once, though two processes have each: AdamW would show it by its size."""
    settings = {**CONTEXT, **UNPADDED, "micro_batch_size": 1}
    check(4, under_context(settings, "qwen3", make_optimizer=make_adamw, updates=2))


def test_shared_sequences_under_sharding_with_recompute() -> None:
    settings = {**CONTEXT, "zero_3_memory_optimization": True, "checkpoint_activations": True}
    check(
        2, under_context({**settings, **FUSED}, "llama", updates=2) + under_context(settings, "gpt")
    )


def test_more_processes_than_key_value_heads_share_sequences() -> None:
    """Rows too short for four processes are computed whole by each."""
    assert min(len(row["input_ids"]) for row in build_rows("llama", 12)) < 8
    settings = {**CONTEXT, "context_parallel_size": 4, "micro_batch_size": 1}
    check(4, under_context(settings, "llama"))


def test_shared_layers_and_shared_sequences() -> None:
    settings = {**CONTEXT, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    fused = under_context({**settings, **FUSED, **UNPADDED}, "llama", updates=2)
    check(4, under_context(settings, "gpt-rope") + fused)


def test_key_value_heads_are_repeated_as_little_as_will_do() -> None:
    assert get_repeats(8, 8, 4) == 1
    assert get_repeats(8, 4, 4) == 1
    assert get_repeats(8, 2, 4) == 2
    assert get_repeats(6, 2, 3) == 3
    assert get_repeats(12, 1, 2) == 2


# ---- what each process works on ------------------------------------------------------------------


def _look_inside() -> dict[str, Any]:
    engine = RapidformerEngine(args={**PADDED, **CONTEXT})
    model: Any = build_model("llama")
    engine.compose(model, make_sgd(model), keep_rate)
    seen: list[int] = []
    look = only_looking(lambda m, x, y: seen.append(y.shape[1]))
    model.model.layers[1].mlp.register_forward_hook(look)
    ids = torch.arange(1, 15).view(2, 7)
    output = model.train()(input_ids=ids, labels=ids)
    kind, own = type(output.logits), output.logits.to_local().shape[1]
    joined = output.logits.full_tensor().detach().numpy()
    with torch.no_grad():
        whole = model.eval()(input_ids=ids, labels=ids)
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
    return {
        "tokens": seen, "kind": kind, "own": own, "joined": joined,
        "whole": whole.logits.numpy(), "cache": whole.past_key_values,
        "states": {state.shape[1] for state in states},
    }  # fmt: skip


def test_each_process_has_its_share_of_tokens_and_logits() -> None:
    first, second = run_in_kept_processes(_look_inside, 2)
    assert (first["tokens"], second["tokens"]) == ([4, 4, 7], [3, 3, 7])
    assert (first["own"], second["own"]) == (4, 3)
    for mine in (first, second):
        assert mine["kind"] is WholeOnDemand
        assert np.allclose(mine["joined"], mine["whole"], rtol=1e-5, atol=1e-6)
        assert mine["states"] == {7}  # what every layer gave: asked for, so whole
        assert mine["cache"] is None  # a cache of shares would mislead


def _count_compiled() -> int:
    settings = {**PADDED, **CONTEXT, "compile": True, "compile_backend": "eager"}
    engine, model = RapidformerEngine(args=settings), build_model("llama")
    before = count_graphs()
    engine.compose(model, make_sgd(model), keep_rate)
    return count_graphs() - before


def test_the_trial_of_a_few_tokens_compiles_nothing() -> None:
    """Training would use none of it."""
    assert run_in_kept_processes(_count_compiled, 2) == [0, 0]


def _run_packed(settings: dict[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
    engine = RapidformerEngine(args={**PADDED, **settings})
    model: Any = build_model("llama")
    apply_packed_attention(model, 16)
    engine.compose(model, make_sgd(model), keep_rate)
    ids = torch.arange(1, 31).view(2, 15)
    positions = torch.tensor([[*range(5), *range(4), *range(6)], [*range(3), *range(12)]])
    inputs = get_inputs(model, {"input_ids": ids, "position_ids": positions, "labels": ids})
    loss = model.train()(**inputs).loss
    with engine.accumulate(is_last=True):
        engine.backward(loss)
    gradients = collect_gradients(model)
    engine.close()
    return loss.item(), gradients


def test_examples_of_a_packed_row_stay_apart() -> None:
    """One of them lies on both sides of the cut."""
    loss, gradients = _run_packed({})
    for mine in run_in_kept_processes(_run_packed, 2, CONTEXT):
        assert mine[0] == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            assert np.allclose(mine[1][name], gradient, rtol=1e-4, atol=1e-6), name


def _run_twice_before_backward(settings: dict[str, Any]) -> dict[str, np.ndarray]:
    engine = RapidformerEngine(args={**PADDED, **settings, "checkpoint_activations": True})
    model: Any = build_model("llama")
    engine.compose(model, make_sgd(model), keep_rate)
    model.train()
    ids = torch.arange(1, 31).view(2, 15)
    first, second = ids[:, :9], ids
    loss = model(input_ids=first, labels=first).loss + model(input_ids=second, labels=second).loss
    with engine.accumulate(is_last=True):
        engine.backward(loss)
    gradients = collect_gradients(model)
    engine.close()
    return gradients


def test_recompute_does_not_meet_the_length_of_a_later_forward_pass() -> None:
    expected = _run_twice_before_backward({})
    for mine in run_in_kept_processes(_run_twice_before_backward, 2, CONTEXT):
        for name, gradient in expected.items():
            assert np.allclose(mine[name], gradient, rtol=1e-4, atol=1e-7), name


def test_a_share_of_one_token_is_no_step_of_generation() -> None:
    """Three tokens on two processes: the second one's would look at those after it, were it one."""
    region = ContextRegion.__new__(ContextRegion)
    region.size, region.is_off = 2, False
    assert [length for length in range(8) if region.can_split(length)] == [4, 5, 6, 7]
    region.size = 4
    assert [n for n in range(17) if region.can_split(n)] == [8, 11, 12, 14, 15, 16]


def test_processes_that_share_sequences_generate_the_same_text() -> None:
    names = ["llama", "gpt"]
    expected = generate(names, {})
    for answers in run_in_kept_processes(generate, 2, names, CONTEXT):
        for name in names:
            assert answers[name][1] == expected[name][1], name
            assert np.allclose(answers[name][0], expected[name][0], atol=1e-4), name


# ---- dropout -------------------------------------------------------------------------------------


def _drop_out() -> tuple[list[np.ndarray], list[np.ndarray], dict[str, np.ndarray]]:
    engine = RapidformerEngine(args={**PADDED, **CONTEXT, "checkpoint_activations": True})
    if not engine.is_main:
        torch.rand(3)  # a script that draws on one process only
    model: Any = build_model("bert-mlm", dropout=0.3)
    loader = engine.data.build_loader(build_rows("bert-mlm", 12), collate, shuffle=False)
    engine.compose(model, make_sgd(model), keep_rate)
    outside: list[np.ndarray] = []
    inside: list[np.ndarray] = []
    for module, kept in ((model.bert.embeddings, outside), (model.bert.encoder.layer[0], inside)):
        module.dropout = module.dropout if module is model.bert.embeddings else None
        layer = module.dropout or module.output.dropout
        layer.register_forward_hook(
            only_looking(lambda m, x, y, kept=kept: kept.append((y == 0).float().numpy()))
        )
    train(engine, model, loader)
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    engine.close()
    return outside, inside, weights


def test_dropout_is_the_same_outside_of_the_blocks_and_another_inside() -> None:
    """Other masks outside would be wrong gradients, unseen by any loss; equal ones inside would
    drop the same units of neighbouring stretches; the same ones in every step, no noise at all."""
    (outside, inside, weights), (others_outside, others_inside, others) = run_in_kept_processes(
        _drop_out, 2
    )
    assert all(np.array_equal(a, b) for a, b in zip(outside, others_outside, strict=True))
    pairs = [(a, b) for a, b in zip(inside, others_inside, strict=True) if a.shape == b.shape]
    assert pairs
    assert not any(np.array_equal(a, b) for a, b in pairs)
    assert len({mask[:1, :1].tobytes() for mask in inside}) > len(inside) / 4
    assert all(np.array_equal(value, others[name]) for name, value in weights.items())


# ---- counting ------------------------------------------------------------------------------------


def _count() -> int:
    engine = RapidformerEngine(args={**PADDED, **CONTEXT})
    meter = Meter(engine.device, engine.runtime.topology)
    meter.add_micro_batch({"loss": (torch.tensor(1.0), 3.0)}, BatchInfo(3, 3, 3, 20, 24))
    meter.add_update(6.0, None)
    measured = meter.read()
    assert measured.losses == [1.0]
    return measured.tokens


def test_tokens_of_a_shared_sequence_are_counted_once() -> None:
    assert run_in_kept_processes(_count, 2) == [20, 20]


# ---- what cannot work ----------------------------------------------------------------------------


def _compose_and_run(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    messages = []
    for name, settings in cases:
        try:
            engine = RapidformerEngine(args={**PADDED, **settings, "train_iters": 3})
            model = build_model(name)
            engine.compose(model)
            model(**collate(build_rows(name)[:2]))
            messages.append("composed")
        except RapidformerError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_shared_is_refused_with_the_reason() -> None:
    three = run_in_kept_processes(
        _compose_and_run, 3, [("bert", {"context_parallel_size": 3, "global_batch_size": 2})]
    )[0]
    assert three[0] == (
        "--context-parallel-size 3 does not divide the 4 attention heads of "
        "BertForSequenceClassification: use 1, 2 or 4."
    )
    cases = [(name, CONTEXT) for name in ("t5", "custom", "mixing", "averaging", "leaky")]
    two = run_in_kept_processes(_compose_and_run, 2, cases)[0]
    for message, reason in zip(
        two,
        (
            "its decoder also uses an encoder's output, which has other tokens",
            "let rapidformer_plan() return 'has_split_attention': True",
            "a block calls multi_head_attention_forward, which also mixes tokens",
            "layers.0 did not call the attention that exchanges tokens",
            "LlamaForCausalLM: something besides its attention uses all tokens",
        ),
        strict=True,
    ):
        assert reason in message


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"context_parallel_size": 2, "pipeline_model_parallel_size": 2},
            "--context-parallel-size cannot be combined with --pipeline-model-parallel-size",
        ),
        (
            {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            "--expert-model-parallel-size cannot be combined with --pipeline-model-parallel-size",
        ),
        (
            {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2},
            "--expert-model-parallel-size cannot be combined with --tensor-model-parallel-size",
        ),
    ],
)
def test_ways_of_sharing_that_do_not_go_together(settings: dict[str, Any], reason: str) -> None:
    args = arguments_from_mapping(settings).replace("test", world_size=4)
    assert any(reason in problem for problem in find_problems(args))
