"""Losses of a user's own, made from more than ``outputs.loss``, under every split.

Each is exact, or refused by name. Gradients are compared with a bare loop in one process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rapidformer.accel.split.on_demand import WholeOnDemand
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.verification.recorder import collect_gradients
from tests.parity.harness import keep_rate
from tests.parity.models import collate
from tests.processes import run_in_kept_processes

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "context": {"context_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "zero-bubble": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble"},
    "fused tensor": {"tensor_model_parallel_size": 2, "fused_loss": "on"},
    "fused context": {"context_parallel_size": 2, "fused_loss": "on"},
}
SETTINGS = {
    "global_batch_size": 4, "micro_batch_size": 2, "clip_grad": 0.0, "seed": 5,
    "log_level": "error", "dynamic_shape": "off",  # there is no padding
}  # fmt: skip
Loss = Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]


def build_model(layers: int = 2) -> Any:
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=40, head_dim=8,
            pad_token_id=0, attn_implementation="eager",
        )
    )  # fmt: skip


def build_rows() -> list[dict[str, Any]]:
    dice = np.random.default_rng(3)
    rows = [dice.integers(1, 67, size=9).tolist() for _ in range(4)]
    return [{"input_ids": row, "attention_mask": [1] * 9, "labels": row} for row in rows]


# ---- the losses ----------------------------------------------------------------------------------


def use_hooks(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Hidden states caught by hooks, as for a distillation."""
    caught: list[torch.Tensor] = []

    def catch(module: nn.Module, given: Any, output: Any) -> None:
        caught.append(output[0] if isinstance(output, tuple) else output)

    handles = [block.register_forward_hook(catch) for block in model.model.layers]
    try:
        loss = model(**batch).loss
    finally:
        for handle in handles:
            handle.remove()
    return loss + sum(hidden.mean(1).square().mean() for hidden in caught)


def use_hidden_states(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    outputs = model(**batch, output_hidden_states=True)
    return outputs.loss + sum(h.mean(1).square().mean() for h in outputs.hidden_states)


def penalise_input_gradient(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A gradient of a gradient, through the loss that the model computes itself."""
    embedded = model.get_input_embeddings()(batch["input_ids"])
    loss = model(inputs_embeds=embedded, labels=batch["labels"]).loss
    (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
    return loss + 10 * gradient.square().sum()


def penalise_input_gradient_of_logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    embedded = model.get_input_embeddings()(batch["input_ids"])
    loss = model(inputs_embeds=embedded).logits.logsumexp(-1).square().mean()
    (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
    return loss + 10 * gradient.square().sum()


def penalise_input_gradient_of_split_logits(
    model: Any, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The same beside the model's own loss, for which ranks keep their slice of the logits."""
    embedded = model.get_input_embeddings()(batch["input_ids"])
    outputs = model(inputs_embeds=embedded, labels=batch["labels"])
    values = outputs.logits.logsumexp(-1).square().mean()
    (gradient,) = torch.autograd.grad(values, embedded, create_graph=True)
    return outputs.loss + 10 * gradient.square().sum()


def penalise_weight_gradient(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = model(input_ids=batch["input_ids"]).logits.logsumexp(-1).square().mean()
    weight = next(model.model.layers[1].mlp.down_proj.parameters())
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    return loss + gradient.square().sum()


def use_attentions(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    outputs = model(**batch, output_attentions=True)
    return outputs.loss + sum(a.mean(1).square().mean() for a in outputs.attentions)


def use_logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's loss and one of the logits beside it."""
    outputs = model(**batch)
    return outputs.loss + outputs.logits.float().logsumexp(-1).square().mean()


def smooth_labels(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss instead of the model's, which was given labels all the same."""
    logits = model(**batch).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    return nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), label_smoothing=0.1
    )


def penalise_parameters(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss + 0.01 * sum(p.square().sum() for p in model.parameters())


def penalise_embedding(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A split weight that is read outside of the model, in a product and by itself."""
    weight = model.get_input_embeddings().weight
    similarity = weight[:5] @ model.lm_head.weight.T
    return model(**batch).loss + (weight.square().sum(-1) - 1).square().mean() + similarity.var()


def embed_outside(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    embedded = model.get_input_embeddings()(batch["input_ids"])
    return model(inputs_embeds=embedded + 0.1 * embedded.sign(), labels=batch["labels"]).loss


def use_own_gradients(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Gradients and weights that the last stage has by itself, also read before the call."""
    head = model.lm_head.weight.square().sum()
    own = sum(p.square().sum() for p in model.model.layers[1].parameters())
    outputs = model(**batch)
    weight = model.model.layers[1].mlp.down_proj.weight
    sources = (outputs.logits, weight)
    gradients = torch.autograd.grad(outputs.loss, sources, retain_graph=True)
    return outputs.loss * sum(g.norm() for g in gradients).detach() + 0.01 * (own + head)


LOSSES: dict[str, Loss] = {
    "attentions": use_attentions,
    "logits": use_logits,
    "smooth labels": smooth_labels,
    "parameters": penalise_parameters,
    "embedding": penalise_embedding,
    "embedded outside": embed_outside,
    "hooks": use_hooks,
    "hidden states": use_hidden_states,
    "input gradient": penalise_input_gradient,
    "input gradient of logits": penalise_input_gradient_of_logits,
    "input gradient of split logits": penalise_input_gradient_of_split_logits,
    "weight gradient": penalise_weight_gradient,
    "own gradients": use_own_gradients,
}
LAYERS = {"embedded outside": 4}  # zero-bubble has two stages on each rank
EXACT = [
    ("sequence", "hooks"), ("context", "hooks"),
    ("sequence", "hidden states"), ("context", "hidden states"),
    ("context", "input gradient"), ("context", "input gradient of logits"),
    ("tensor", "input gradient of logits"), ("sequence", "input gradient of logits"),
    ("tensor", "input gradient of split logits"), ("context", "input gradient of split logits"),
    ("tensor", "attentions"), ("sequence", "attentions"), ("context", "attentions"),
    ("tensor", "logits"), ("context", "logits"), ("pipeline", "logits"),
    ("fused tensor", "smooth labels"), ("fused context", "smooth labels"),
    ("fused tensor", "logits"), ("fused context", "logits"),
    ("fused tensor", "input gradient"), ("fused context", "input gradient"),
    ("tensor", "parameters"), ("sequence", "parameters"), ("context", "parameters"),
    ("tensor", "embedding"), ("sequence", "embedding"), ("context", "embedding"),
    ("tensor", "embedded outside"), ("pipeline", "embedded outside"),
    ("zero-bubble", "embedded outside"), ("pipeline", "own gradients"),
]  # fmt: skip
_SPLIT_LOSS = "cannot pass through the loss over the split vocabulary"
_WEIGHT_GRADIENT = "the loss uses the gradient of model.layers.1.mlp.down_proj.weight"
REFUSED = {
    ("pipeline", "hidden states"): "output_hidden_states=True collects something from every block",
    ("tensor", "input gradient"): _SPLIT_LOSS,
    ("sequence", "input gradient"): _SPLIT_LOSS,
    ("tensor", "weight gradient"): _WEIGHT_GRADIENT,
    ("context", "weight gradient"): _WEIGHT_GRADIENT,
}


# ---- runs ----------------------------------------------------------------------------------------


def run_one(loss: str) -> dict[str, np.ndarray]:
    model, rows = build_model(LAYERS.get(loss, 2)).train(), build_rows()
    for start in (0, 2):
        (LOSSES[loss](model, collate(rows[start : start + 2])) / 2).backward()
    return collect_gradients(model)


def compose(layout: str, model: nn.Module) -> tuple[RapidformerEngine, Any]:
    engine = RapidformerEngine(args={**SETTINGS, **LAYOUTS[layout]})
    loader = engine.data.build_loader(build_rows(), collate, shuffle=False, is_training=True)
    engine.compose(model, torch.optim.SGD(model.parameters(), lr=0.1), keep_rate)
    return engine, loader


def run_update(engine: RapidformerEngine, loader: Any, loss: Loss) -> None:
    model: Any = engine.model.module
    model.train()
    for update in engine.data.iterate_updates(loader):
        engine.run_update(lambda batch: (loss(model, batch), 1.0), update)


def run_split(cases: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """Gradients of each case, or why it was refused; called in every process."""
    found: dict[tuple[str, str], Any] = {}
    for layout, loss in cases:
        try:
            engine, loader = compose(layout, build_model(LAYERS.get(loss, 2)))
            run_update(engine, loader, LOSSES[loss])
            found[layout, loss] = collect_gradients(engine.model.module)
        except RapidformerError as error:
            found[layout, loss] = str(error)
    return found


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_that_of_one_process_or_is_refused_by_name(loss: str) -> None:
    cases = [case for case in (*EXACT, *REFUSED) if case[1] == loss]
    found, expected = run_in_kept_processes(run_split, 2, cases), run_one(loss)
    for case in cases:
        everyone = [process[case] for process in found]
        if case in REFUSED:
            assert all(REFUSED[case] in message for message in everyone), case
            continue
        for gradients in everyone:
            assert not isinstance(gradients, str), (case, gradients)
            for name, gradient in gradients.items():
                scale = np.abs(expected[name]).max()
                assert np.abs(gradient - expected[name]).max() <= 1e-5 * scale, (case, name)
        assert set().union(*everyone) == expected.keys(), case


# ---- hooks under a pipeline ----------------------------------------------------------------------


def hook_under_pipeline() -> dict[str, str]:
    """Hooks on blocks of either stage, before and after the model was composed."""

    def look(module: nn.Module, given: Any, output: Any) -> None: ...

    found = {}
    model = build_model(layers=4)
    model.model.layers[0].mlp.register_forward_hook(look)
    try:
        compose("pipeline", model)
    except RapidformerError as error:
        found["before"] = str(error)
    model = build_model(layers=4)
    engine, loader = compose("pipeline", model)
    handle = model.model.layers[1].register_forward_hook(look)
    try:
        run_update(engine, loader, lambda model, batch: model(**batch).loss)
    except RapidformerError as error:
        found["after"] = str(error)
    handle.remove()
    model.model.layers[3].register_forward_hook(look)
    look.only_looks = True  # type: ignore[attr-defined]
    model.model.layers[1].register_forward_hook(look)
    run_update(engine, loader, lambda model, batch: model(**batch).loss)
    return found


def test_a_hook_on_a_block_of_another_stage_is_refused() -> None:
    for found in run_in_kept_processes(hook_under_pipeline, 2):
        assert "a hook on model.layers.0.mlp, which runs on another stage" in found["before"]
        assert "a hook on model.layers.1, which runs on another stage" in found["after"]


# ---- parameters and gradients of other stages ----------------------------------------------------


def penalise_base(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss + sum(p.square().sum() for p in model.model.parameters())


def penalise_block(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    penalty = sum(p.square().sum() for p in model.model.layers[0].parameters())
    return model(**batch).loss + penalty


def penalise_weight(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss + model.model.layers[0].mlp.up_proj.weight.square().sum()


def use_unused_gradient(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """An adversarial perturbation's gradient, by code that tolerates unused inputs."""
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, labels=batch["labels"]).loss
    (gradient,) = torch.autograd.grad(loss, embedded, allow_unused=True, retain_graph=True)
    return loss if gradient is None else loss + gradient.norm()


def use_tied_gradient(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = model(**batch).loss
    (gradient,) = torch.autograd.grad(loss, model.lm_head.weight, retain_graph=True)
    return loss + gradient.norm()


def tie(model: Any) -> Any:
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


_PENALTY = "so a penalty over them would be wrong. For a penalty on their size use --weight-decay"
_GRADIENT = "takes a gradient (torch.autograd.grad) with respect to what another stage has computed"
OF_OTHER_STAGES: dict[str, tuple[Loss, str]] = {
    "parameters": (penalise_parameters, f"a LlamaForCausalLM, but each rank holds.*{_PENALTY}"),
    "base model": (penalise_base, f"of a LlamaModel, but each rank holds.*{_PENALTY}"),
    "block": (penalise_block, f"of a LlamaDecoderLayer, but each rank holds.*{_PENALTY}"),
    "weight": (penalise_weight, "model.layers.0.mlp.up_proj.weight is not on this rank but on"),
    "embedding": (penalise_embedding, "model.embed_tokens.weight is not on this rank but on"),
    "input gradient": (penalise_input_gradient, re.escape(_GRADIENT)),
    "unused gradient": (use_unused_gradient, re.escape(_GRADIENT)),
    "tied gradient": (use_tied_gradient, re.escape(_GRADIENT)),
}


def run_pipelined(loss: str) -> None:
    model = build_model()
    engine, loader = compose("pipeline", tie(model) if loss == "tied gradient" else model)
    run_update(engine, loader, OF_OTHER_STAGES[loss][0])


@pytest.mark.parametrize("loss", OF_OTHER_STAGES)
def test_a_loss_from_other_stages_is_refused_by_the_last_one(loss: str) -> None:
    with pytest.raises(AssertionError, match=OF_OTHER_STAGES[loss][1]):
        run_in_kept_processes(run_pipelined, 2, loss)


# ---- torch's clipping ----------------------------------------------------------------------------


def select_parameters(model: Any) -> dict[str, Any]:
    """What a script may want to clip, and by which norm."""
    return {
        "all": (list(model.parameters()), 2.0),
        "inside": (model.model.parameters(), 2.0),
        "block": (model.model.layers[0].parameters(), 2.0),
        "largest": (model.parameters(), float("inf")),
    }


def clip(model: Any) -> dict[str, float]:
    """The norms; each is measured after clipping by the ones before."""
    return {
        name: float(nn.utils.clip_grad_norm_(parameters, 0.3, norm_type=order))
        for name, (parameters, order) in select_parameters(model).items()
    }


def clip_pipelined() -> tuple[dict[str, float], dict[str, np.ndarray]]:
    engine, loader = compose("pipeline", tie(build_model()))
    assert next(engine.model.module.parameters()).device.type == "cpu"  # type: ignore[union-attr]
    run_update(engine, loader, lambda model, batch: model(**batch).loss)
    return clip(engine.model.module), collect_gradients(engine.model.module)  # type: ignore[arg-type]


def test_clipping_by_torch_under_a_pipeline_uses_the_norm_of_all_stages() -> None:
    model = tie(build_model()).train()
    rows = build_rows()
    for start in (0, 2):
        (model(**collate(rows[start : start + 2])).loss / 2).backward()
    expected = clip(model)
    gradients = collect_gradients(model)
    for norms, mine in run_in_kept_processes(clip_pipelined, 2):
        assert norms == pytest.approx(expected, rel=1e-5)
        for name, gradient in mine.items():
            assert np.allclose(gradient, gradients[name], rtol=1e-4, atol=1e-7), name


# ---- parameters collected before compose ---------------------------------------------------------


def use_earlier_parameters(layouts: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """What every use of such a list says, by layout."""
    found = {}
    for layout, settings in layouts.items():
        model = build_model()
        collected = list(model.parameters())
        engine = RapidformerEngine(args={**SETTINGS, **settings})
        engine.compose(model, torch.optim.SGD(model.parameters(), lr=0.1), keep_rate)
        assert sum(p.numel() for p in collected) > 0
        found[layout] = []
        for use in (
            lambda some: nn.utils.clip_grad_norm_(some, 1.0),
            lambda some: sum(p.square().sum() for p in some),
            lambda some: [p.requires_grad_(False) for p in some],
        ):
            with pytest.raises(RapidformerError) as caught:
                use(collected)
            found[layout].append(str(caught.value))
    return found


def test_parameters_collected_before_compose_are_refused_if_they_were_replaced() -> None:
    layouts = {name: LAYOUTS[name] for name in ("tensor", "pipeline")}
    layouts["zero"] = {"zero_3_memory_optimization": True}
    for found in run_in_kept_processes(use_earlier_parameters, 2, layouts):
        for message in (each for messages in found.values() for each in messages):
            assert "was collected before engine.compose(), which has split it or moved" in message
            assert "call model.parameters() after compose()" in message


# ---- split tensors in a user's hands -------------------------------------------------------------


def look_at_split_tensors() -> dict[str, Any]:
    engine, loader = compose("tensor", build_model())
    model: Any = engine.model.module
    batch = collate(build_rows())
    logits = model.train()(**batch).logits
    weight = model.lm_head.weight
    found: dict[str, Any] = {"kinds": [type(logits), type(weight)]}
    if engine.is_main:  # alone: nothing may be sent for it
        found["facts"] = (tuple(logits.shape), weight.shape, logits.dtype, repr(logits))
    with torch.no_grad():
        model.lm_head.weight.clamp_(-0.01, 0.01)
    model.get_input_embeddings().weight.data.mul_(2.0)
    found["weights"] = [
        m.weight.detach().numpy() for m in (model.lm_head, model.model.embed_tokens)
    ]
    run_update(engine, loader, use_logits)
    found["gradient"] = model.lm_head.weight.grad.full_tensor().abs().sum().item()
    return found


def test_a_split_tensor_tells_its_shape_without_the_others_and_is_changed_in_place() -> None:
    first, second = run_in_kept_processes(look_at_split_tensors, 2)
    assert {*first["kinds"], *second["kinds"]} == {WholeOnDemand}
    shape = (4, 9, 67)
    assert first["facts"][:3] == (shape, (67, 32), torch.float32)
    assert first["facts"][3] == f"WholeOnDemand(shape={shape}, dtype=torch.float32)"
    model = build_model()
    expected = [
        model.lm_head.weight.detach().clamp(-0.01, 0.01),
        model.model.embed_tokens.weight * 2,
    ]
    for mine in (first, second):
        for weight, whole in zip(mine["weights"], expected, strict=True):
            assert np.array_equal(weight, whole.detach().numpy())
        assert mine["gradient"] > 0


# ---- layers that cannot be split -----------------------------------------------------------------


def compose_with_weight_norm() -> str:
    model = build_model()
    nn.utils.parametrizations.weight_norm(model.model.layers[1].mlp.up_proj)
    with pytest.raises(ConfigurationError) as caught:
        compose("tensor", model)
    return str(caught.value)


def test_a_parametrized_layer_is_refused_by_name() -> None:
    for message in run_in_kept_processes(compose_with_weight_norm, 2):
        assert "model.layers.1.mlp.up_proj" in message
        assert "weight_norm or another parametrization" in message
        assert "remove_parametrizations" in message
