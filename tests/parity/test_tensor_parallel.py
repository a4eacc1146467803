"""Layers split over processes == one process: losses, every gradient, updated weights, ties.

The whole matrix runs by ``python tests/parity/matrix.py``; each test here says what its row guards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from rapidformer.accel.fused_loss import chunked
from rapidformer.accel.fused_loss.chunked import Recipe, compute_losses
from rapidformer.dist.regions import copy_in
from rapidformer.dist.topology import build_topology
from rapidformer.dist.vocabulary import VocabularySlice, compute_split_losses
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError, TrainingError
from rapidformer.models.gpt import GPTConfig, GPTModel
from rapidformer.verification.trace import Trace
from tests.parity.generating import generate
from tests.parity.harness import (
    PADDED,
    UNPADDED,
    Settings,
    Training,
    check,
    keep_rate,
    make_adamw,
    make_sgd,
    run_one,
    train,
    under,
)
from tests.parity.limits import get_bytes
from tests.parity.models import GIVEN_PLANS, build_model, build_rows, collate
from tests.parity.own_models import PLAN, UnplannedModel
from tests.processes import run_in_kept_processes

TENSOR: Settings = {"tensor_model_parallel_size": 2}
FUSED: Settings = {"fused_loss": "on"}


def check_fraction(traces: list[Trace], model: str, fraction: float) -> None:
    """Each process holds less than this fraction of the parameters."""
    whole = get_bytes(run_one(Training(model)))
    assert all(get_bytes(trace) < fraction * whole for trace in traces), model


def test_two_processes_that_share_layers_equal_one() -> None:
    """Tied embeddings, norms on a fraction of the heads, fused and uneven weights, accumulation."""
    names = ["gpt2", "llama", "vit", "custom", "unplanned", "deepseek"]
    fused = ["bert-mlm", "t5", "apertus", "gpt-oss"]
    cases = under(TENSOR, *names) + under({**TENSOR, **FUSED}, *fused)
    # gpt2, t5 and llama without padding are in test_unpad.py.
    unpadded = ["roberta", "gpt", "qwen3"]
    cases += under({**TENSOR, **UNPADDED}, *unpadded)
    traces = dict(zip(names + fused + unpadded, check(2, cases), strict=True))
    for name in ("gpt2", "t5", "llama", "qwen3", "gpt"):
        check_fraction(traces[name], name, 0.54)


def test_ten_updates_of_shared_layers() -> None:
    """Round-off may not grow into a difference, in weights that are split or kept whole."""
    check(2, under({**TENSOR, "micro_batch_size": 8}, "qwen3", epochs=5))


def test_more_processes_than_key_value_heads() -> None:
    traces = check(4, under({"tensor_model_parallel_size": 4}, "llama", "gpt2"))
    check_fraction(traces[1], "gpt2", 0.31)


def test_split_tokens_change_nothing() -> None:
    """Rows of odd lengths: slices of tokens differ between the processes."""
    lengths = [len(row["input_ids"]) for row in build_rows("llama", 12)]
    assert any(length % 2 for length in lengths)
    settings = {**TENSOR, "sequence_parallel": True}
    capped = under({**settings, **FUSED, **UNPADDED}, "gemma2")
    # In the last four, parts that the plan keeps together or does not know are given all tokens.
    names = ["llama", "gpt2", "gpt", "bert", "vit", "phi3", "mixtral", "deepseek", "apertus"]
    check(2, under(settings, *names) + capped)


def test_shared_layers_under_data_parallelism() -> None:
    """With fused AdamW, which wants tensors of one kind, and clipping, which must count once."""
    check(4, under({**TENSOR, **UNPADDED}, "qwen3", make_optimizer=make_adamw))


@pytest.mark.parametrize("stage", ["zero_1", "zero_2", "fsdp"])
def test_shared_layers_under_sharding(stage: str) -> None:
    """A fused bias that both split comes back in order: its gradient is compared whole."""
    settings = {**TENSOR, f"{stage}_memory_optimization": True}
    more = {"zero_1": FUSED, "zero_2": {}, "fsdp": {**FUSED, **UNPADDED}}[stage]
    traces = check(4, under({**settings, **more}, "gpt2"))
    check_fraction(traces[0], "gpt2", 0.28)


def test_split_tokens_under_sharding_with_recompute() -> None:
    settings = {
        **TENSOR, "sequence_parallel": True, "checkpoint_activations": True,
        "zero_3_memory_optimization": True,
    }  # fmt: skip
    check(4, under(settings, "llama"))


# ---- what is kept whole stays equal --------------------------------------------------------------


def _train_with_dropout(names: list[str]) -> dict[str, tuple[bool, dict[str, np.ndarray]]]:
    found = {}
    for name in names:
        engine = RapidformerEngine(args={**PADDED, "tensor_model_parallel_size": 2})
        if not engine.is_main:
            torch.rand(3)  # a script that draws on one process only
        model = build_model(name, dropout=0.2)
        loader = engine.data.build_loader(build_rows(name, 8), collate, shuffle=False)
        engine.compose(model, make_sgd(model), keep_rate)
        train(engine, model, loader)
        are_split = all(isinstance(p, DTensor) for p in model.parameters())
        whole = {
            key: p.to_local().detach().numpy().copy()
            for key, p in model.named_parameters()
            if p.placements[0].is_replicate()
        }
        found[name] = (are_split, whole)
    engine.close()
    return found


def test_whole_weights_stay_equal_under_dropout() -> None:
    """Processes that drew other masks would drift apart, unseen by any loss."""
    names = ["bert", "gpt2", "t5"]
    first, second = run_in_kept_processes(_train_with_dropout, 2, names)
    for name in names:
        (is_split, mine), (_, others) = first[name], second[name]
        assert is_split
        assert mine
        for key, value in mine.items():
            assert np.array_equal(value, others[key]), (name, key)


# ---- generating and evaluating -------------------------------------------------------------------


def test_split_models_generate_the_same_text() -> None:
    names = ["llama", "t5"]
    expected = generate(names, {})
    settings = {"tensor_model_parallel_size": 2, "zero_3_memory_optimization": True}
    for answers in run_in_kept_processes(generate, 4, names, settings):
        for name in names:
            assert answers[name][1] == expected[name][1], name
            assert np.allclose(answers[name][0], expected[name][0], atol=1e-4), name


# ---- the loss over a split vocabulary ------------------------------------------------------------


def _run_megatron_form(settings: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    """Labels by position, losses per token; and the gradient that they give."""
    engine = RapidformerEngine(args={**PADDED, **settings})
    torch.manual_seed(3)
    model = GPTModel(
        GPTConfig(
            num_layers=1, hidden_size=32, num_attention_heads=4, max_position_embeddings=8,
            vocab_size=67, hidden_dropout=0.0, attention_dropout=0.0,
        )
    )  # fmt: skip
    engine.compose(model, make_sgd(model), keep_rate)
    tokens = torch.arange(1, 11).view(2, 5)
    positions = torch.arange(5).expand(2, 5)
    kinds = []
    model.output.register_forward_hook(lambda module, given, logits: kinds.append(type(logits)))
    losses = model(tokens, positions, None, tokens + 1)
    engine.backward(losses.mean())
    gradient = model.word_embeddings._parameters["weight"].grad
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    logits = model(tokens, positions)
    engine.close()
    return losses.detach().numpy(), whole.numpy().copy(), logits.detach().numpy(), kinds


def test_megatrons_form_computes_its_loss_from_split_logits() -> None:
    losses, gradient, logits, _ = _run_megatron_form({})
    for mine in run_in_kept_processes(_run_megatron_form, 2, {"tensor_model_parallel_size": 2}):
        # Beside the whole, not element by element: one that is a difference of large numbers
        # consists of their rounding, which is another on every processor.
        for found, expected in zip(mine[:3], (losses, gradient, logits), strict=True):
            assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)
        assert mine[3] == [DTensor, torch.Tensor]  # joined where there are no labels


def _compute_losses() -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    RapidformerEngine(args={**PADDED, "tensor_model_parallel_size": 4})
    mesh = build_topology("cpu", tensor=4).get_submesh("tensor")
    logits, labels, factors = _build_logits()
    start, end = (min(2 * (mesh.get_local_rank() + i), 5) for i in (0, 1))
    local = logits[..., start:end].contiguous().requires_grad_()
    split = DTensor.from_local(
        local, mesh, [Shard(2)], run_check=False, shape=logits.shape, stride=logits.stride()
    )
    losses = compute_split_losses(split, labels)
    (losses * factors).sum().backward()
    return losses.detach().numpy(), local.grad.numpy(), _fuse_losses(mesh.get_group(), start, end)


def _fuse_losses(group: Any, start: int, end: int) -> list[np.ndarray]:
    """The loss from hidden states in chunks of four rows, and its gradients on this rank."""
    hidden, weight, labels, recipe = _build_head()
    weight = weight.detach()[start:end].requires_grad_()
    chunked.choose_chunk = lambda rows, width, device: 4
    recipe = replace(recipe, words=VocabularySlice(group, 5))
    loss = compute_losses(copy_in(hidden, group), weight, None, labels, recipe).values
    loss.backward()
    return [each.detach().numpy() for each in (loss, hidden.grad, weight.grad)]


def _build_head() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Recipe]:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 6, generator=generator).requires_grad_() for n in (10, 5))
    labels = torch.tensor([0, 4, -100, 2, 1, 3, 3, -100, 4, 0])
    return hidden, weight, labels, Recipe(label_smoothing=0.1, steps=(torch.tanh,))


def _build_logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 5, generator=generator) * 30
    labels = torch.tensor([[0, 4, -100], [2, 1, 3]])
    return logits, labels, torch.rand(2, 3, generator=generator)


def test_a_vocabulary_smaller_than_its_processes_allow() -> None:
    """Five words on four processes: two, two, one and none; from logits, and from hidden states."""
    logits, labels, factors = _build_logits()
    logits.requires_grad_()
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    (expected.view(2, 3) * factors).sum().backward()
    results = run_in_kept_processes(_compute_losses, 4)
    for losses, _, _ in results:
        assert np.allclose(losses.flatten(), expected.detach().numpy(), rtol=1e-6, atol=1e-6)
    gradient = np.concatenate([gradient for _, gradient, _ in results], axis=-1)
    assert np.allclose(gradient, logits.grad.numpy(), rtol=1e-5, atol=1e-7)
    hidden, weight, labels, recipe = _build_head()
    loss = compute_losses(hidden, weight, None, labels, recipe).values
    loss.backward()
    for total, of_hidden, _ in (fused for *_, fused in results):
        assert np.allclose(total, loss.item(), rtol=1e-6)
        assert np.allclose(of_hidden, hidden.grad.numpy(), rtol=1e-5, atol=1e-6)
    of_weight = np.concatenate([fused[2] for *_, fused in results])
    assert np.allclose(of_weight, weight.grad.numpy(), rtol=1e-5, atol=1e-6)


# ---- what cannot work ----------------------------------------------------------------------------


def _compose_all(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    messages = []
    for name, settings in cases:
        try:
            engine = RapidformerEngine(args={**PADDED, **settings, "lr": 0.1, "train_iters": 3})
            engine.compose(build_model(name), plan=GIVEN_PLANS.get(name))
            messages.append("composed")
        except ConfigurationError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_split_is_refused_with_the_reason() -> None:
    shared = {"tensor_model_parallel_size": 3, "global_batch_size": 2}
    cases = [
        ("bert", shared),
        ("custom", shared),
        ("t5", {**shared, "tensor_model_parallel_size": 2, "global_batch_size": 4}),
    ]
    three = run_in_kept_processes(_compose_all, 3, cases)[0]
    assert three[0] == (
        "--tensor-model-parallel-size 3 does not divide the 4 attention heads of "
        "BertForSequenceClassification: use 1, 2 or 4."
    )
    assert "layers.0.attention.query of CustomModel has 32 outputs, not a multiple of 3" in three[1]
    heads = "layers.1.attention.num_heads of CustomModel is 4, which is not a multiple of 3"
    assert heads in three[1]
    assert three[2].startswith(
        "--tensor-model-parallel-size 2 does not divide the 3 ranks of this run: use 1 or 3"
    )
    tokens = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    cases = [("t5", tokens), ("custom", tokens), ("unplanned", tokens)]
    cases += [("gpt2", {"tensor_model_parallel_size": 2, "optimizer": "muon"})]
    two = run_in_kept_processes(_compose_all, 2, cases)[0]
    for message, reason in zip(
        two,
        (
            "its decoder looks at the encoder's output, whose tokens are whole",
            "the model's rapidformer_plan() does not say has_split_sequences",
            "the plan given to compose() does not say has_split_sequences",
            "--optimizer muon cannot be combined with --tensor-model-parallel-size",
        ),
        strict=True,
    ):
        assert reason in message


class _ForgottenNorm(UnplannedModel):
    """Each head's output is scaled by a weight that the plan does not name."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            attention: Any = layer.attention
            attention.output = nn.Sequential()
            attention.output.add_module("scale", _Scale())
            attention.output.add_module("product", nn.Linear(32, 32))


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((8,), 1.1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.unflatten(-1, (-1, 8)) * self.factor).flatten(-2)


def _train_forgotten(*plans: dict[str, str]) -> list[str]:
    return [_train_under(styles) for styles in plans]


def _train_under(styles: dict[str, str]) -> str:
    engine = RapidformerEngine(args={**PADDED, "tensor_model_parallel_size": 2})
    torch.manual_seed(3)
    model = _ForgottenNorm()
    tensor = {k: v for k, v in PLAN["tensor"].items() if not k.endswith("attention.output")}
    tensor |= {"layers.*.attention.output.product": "rowwise", **styles}
    loader = engine.data.build_loader(build_rows("custom", 16), collate, shuffle=False)
    engine.compose(model, make_sgd(model), keep_rate, plan={**PLAN, "tensor": tensor})
    try:
        train(engine, model, loader)
    except TrainingError as error:
        return str(error)
    return "trained"


def test_a_weight_that_the_plan_forgot_is_found_in_the_first_update() -> None:
    """Its copies would drift apart, and no loss would show it."""
    named = {"layers.*.attention.output.scale": "replicated_with_grad_allreduce"}
    for message, second in run_in_kept_processes(_train_forgotten, 2, {}, named):
        assert second == "trained"
        assert "layers.0.attention.output.scale.factor" in message
        assert "layers.1.attention.output.scale.factor" in message
        assert "'replicated_with_grad_allreduce'" in message
        assert "norm" not in message, "the others are alike"


def _feed_unknown_ids() -> list[str]:
    engine = RapidformerEngine(args={**PADDED, "tensor_model_parallel_size": 2})
    model: Any = build_model("llama")
    engine.compose(model, make_sgd(model), keep_rate)
    ids, known = torch.tensor([[1, 67]]), torch.tensor([[1, 2]])
    messages = []
    for given, labels in ((ids, known), (known, ids)):
        with pytest.raises(RuntimeError) as error:
            model.train()(input_ids=given, labels=labels)
        messages.append(str(error.value))
    return messages


def test_ids_that_no_process_has_are_refused() -> None:
    """Each process takes those it does not know for another's: they would become zeros."""
    for first, second in run_in_kept_processes(_feed_unknown_ids, 2):
        assert "an id in the batch is outside of the 67 of the vocabulary" in first
        assert "a label is outside of the 67 of the vocabulary" in second
