"""What users do in their own loops: exact under every layout, or refused with a reason."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from rapidformer.dist.whole import join_whole
from rapidformer.engine import RapidformerEngine
from tests.parity.harness import keep_rate, make_sgd, zero
from tests.parity.models import build_model
from tests.parity.own_loop import SETTINGS, TENSOR, Loop, assert_same, run_case, run_on_ranks
from tests.parity.own_models import PlainModel

GPT2 = {"model_name": "small-gpt2"}
VALIDATION = 100
"""The number of a batch that is never trained on."""
CAN_JOIN_FUSED = torch.__version__ >= (2, 13)
"""torch 2.11 cannot compute with a fused weight that is split by heads."""


# ---- a look at validation data, and weights changed by hand --------------------------------------


def look_before_the_step(loop: Loop) -> None:
    for number in range(2):
        loop.engine.backward(loop.compute_loss(number))
        with torch.no_grad():
            loop.note_mean(loop.compute_loss(VALIDATION))
        loop.engine.step()
    with torch.no_grad():
        loop.note_mean(loop.compute_loss(VALIDATION))


def look_with_gradients(loop: Loop) -> None:
    """Without ``no_grad``, and in training mode: nothing tells the pass from one of training."""
    for number in range(2):
        loop.engine.backward(loop.compute_loss(number))
        loop.note_mean(loop.compute_loss(VALIDATION))
        loop.engine.step()
    loop.values.append(sum(float(join_whole(p).abs().sum()) for p in loop.model.parameters()))


def clamp_after_a_look(loop: Loop) -> None:
    for number in range(2):
        loop.engine.backward(loop.compute_loss(number))
        loop.engine.step()
        loop.model.eval()
        loop.note_mean(loop.compute_loss(VALIDATION))
        loop.model.train()
        for parameter in loop.model.parameters():
            parameter.data.clamp_(-0.1, 0.1)


def clamp_while_accumulating(loop: Loop) -> None:
    """ZeRO-1 and ZeRO-2 keep weights gathered between the micro-batches of an update."""
    for number in range(2):
        for micro_batch in range(2):
            with loop.engine.accumulate(is_last=micro_batch == 1):
                loop.engine.backward(loop.compute_loss(2 * number + micro_batch))
            with torch.no_grad():
                for parameter in loop.model.parameters():
                    parameter.clamp_(-0.1, 0.1)
        loop.engine.step()


def clear_while_accumulating(loop: Loop) -> None:
    """ZeRO-1 adds up the gradients of gathered weights, which the model's parameters are then."""
    for number in range(2):
        for micro_batch in range(3):
            loop.model.zero_grad()
            with loop.engine.accumulate(is_last=micro_batch == 2):
                loop.engine.backward(loop.compute_loss(3 * number + micro_batch))
        loop.optimizer.step()


def clip_while_accumulating(loop: Loop) -> None:
    for micro_batch in range(2):
        with loop.engine.accumulate(is_last=micro_batch == 1):
            loop.engine.backward(loop.compute_loss(micro_batch))
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


def clip_values_while_accumulating(loop: Loop) -> None:
    for micro_batch in range(2):
        with loop.engine.accumulate(is_last=micro_batch == 1):
            loop.engine.backward(loop.compute_loss(micro_batch))
        nn.utils.clip_grad_value_(loop.model.parameters(), 1.0)


def halve_and_clip(loop: Loop) -> None:
    for number in range(2):
        loop.engine.backward(loop.compute_loss(number))
        for parameter in loop.model.parameters():
            parameter.grad = parameter.grad * 0.5
        loop.values.append(float(loop.engine.clip_grad_norm(0.1)))
        loop.engine.step()


def step_with_a_closure(loop: Loop) -> None:
    """Two gradients per update, as SAM's: the first only moves the weights."""
    for number in range(2):
        moves = []

        def compute(number: int = number) -> None:
            loop.engine.backward(loop.compute_loss(number))

        compute()
        with torch.no_grad():
            for parameter in loop.model.parameters():
                moves.append(0.05 * parameter.grad)
                parameter.add_(moves[-1])
        loop.optimizer.zero_grad()

        def compute_and_return(moves: list[torch.Tensor] = moves) -> None:
            compute()
            with torch.no_grad():
                for parameter, move in zip(loop.model.parameters(), moves, strict=True):
                    parameter.sub_(move)

        loop.optimizer.step(compute_and_return)
        loop.optimizer.zero_grad()


def test_looks_and_changes_by_hand_between_updates() -> None:
    cases = [look_before_the_step, look_with_gradients, clamp_after_a_look]
    layouts = [zero(1), zero(2), zero(3), zero(2, cpu_offload=True)]
    runs = [(case, layout, GPT2) for case in cases for layout in layouts]
    # Changes to gathered weights are copied to shards of uneven sizes, some of them empty.
    runs += [(clamp_while_accumulating, zero(stage), {}) for stage in (1, 2, 3)]
    cases = [clear_while_accumulating, halve_and_clip, step_with_a_closure]
    runs += [(c, layout, {}) for c in cases for layout in ({}, zero(1), zero(2), zero(3))]
    runs += [(case, TENSOR, GPT2) for case in cases]
    assert_same(runs)


# ---- parameters unfrozen after compose -----------------------------------------------------------


def make_half_frozen() -> nn.Module:
    """A whole block is frozen, and parts of others."""
    model = build_model("small-gpt2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.1." in name or "ln_f" in name)
    return model


def unfreeze_between_updates(loop: Loop) -> None:
    for number in range(4):
        if number == 2:
            loop.model.requires_grad_(True)
        # A weight other than 1: the gradient must be divided as well as summed.
        loop.engine.backward(loop.compute_loss(number), 3.0)
        loop.engine.step()


def unfreeze_while_accumulating(loop: Loop) -> None:
    for number in range(2):
        for micro_batch in range(2):
            with loop.engine.accumulate(is_last=micro_batch == 1):
                loop.engine.backward(loop.compute_loss(2 * number + micro_batch), 3.0)
            loop.model.requires_grad_(True)
        loop.engine.step()


def test_parameters_unfrozen_after_compose_are_trained_alike_on_all_ranks() -> None:
    options = {"make_model": make_half_frozen}
    layouts = [{}, zero(1), zero(2), zero(3), TENSOR]
    cases = [unfreeze_between_updates, unfreeze_while_accumulating]
    assert_same([(case, layout, options) for case in cases for layout in layouts])


def add_a_layer(loop: Loop) -> None:
    loop.model.head = nn.Linear(16, 64)
    loop.optimizer.add_param_group({"params": [*loop.model.head.parameters()]})
    loop.engine.backward(loop.compute_loss(0))


def test_parameters_added_after_compose_are_refused_on_several_ranks() -> None:
    """Each rank would train its own."""
    for ranks in run_on_ranks([(add_a_layer, layout, {}) for layout in ({}, zero(1))]):
        assert all("optimizer was given 2 parameters after compose()" in o.error for o in ranks)


def make_sparse_model() -> nn.Module:
    model = build_model("small-plain")
    model.embedding.sparse = True
    return model


def test_sparse_gradients_are_refused_on_several_ranks() -> None:
    options = {"make_model": make_sparse_model}
    for ranks in run_on_ranks([(halve_and_clip, layout, options) for layout in ({}, zero(1))]):
        assert all("embedding of PlainModel has sparse gradients" in o.error for o in ranks)


def test_unfrozen_parameters_that_no_optimizer_holds_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train_only_what_was_trainable(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    with caplog.at_level("WARNING"):
        run_case(
            unfreeze_between_updates,
            {"log_level": "warning"},
            make_model=make_half_frozen,
            make_optimizer=train_only_what_was_trainable,
        )
    assert "unfrozen after compose(), but the optimizer does not hold them" in caplog.text


# ---- weights in a loss, parts of a model called by themselves, copies ----------------------------


def penalise_weights(loop: Loop) -> None:
    for number in range(2):
        before = sum(
            loop.engine.model.gather_weight(p).abs().sum() for p in loop.model.parameters()
        )
        loss = loop.compute_loss(number)
        after = sum(
            loop.engine.model.gather_weight(p).pow(2).sum() for p in loop.model.parameters()
        )
        loop.values += [float(before.detach()), float(after.detach())]
        # Unequal weights of the micro-batches: the penalty must not depend on them.
        weight = 1.0 + loop.engine.runtime.topology.get_rank("data")
        loop.engine.backward(0.0 * loss + 0.01 * before + 0.01 * after, weight)
        loop.engine.step()


def penalise_shards(loop: Loop) -> None:
    penalty = sum(p.pow(2).sum() for p in loop.model.parameters())
    loop.engine.backward(loop.compute_loss(0) + 0.01 * penalty)
    loop.engine.step()


def call_the_embedding(loop: Loop) -> None:
    """Also while weights are gathered: before the second micro-batch of an update."""
    for number in range(2):
        for micro_batch in range(2):
            batch = loop.get_batch(2 * number + micro_batch)
            embedded = loop.model.get_input_embeddings()(batch.pop("input_ids"))
            with loop.engine.accumulate(is_last=micro_batch == 1):
                loop.engine.backward(loop.model(inputs_embeds=embedded, **batch)["loss"])
        loop.engine.step()


def call_the_parts(loop: Loop) -> None:
    """The model itself is called only after its parts were."""
    for number in range(2):
        batch = loop.get_batch(number)
        labels = batch.pop("labels")
        hidden = loop.model.transformer(**batch).last_hidden_state
        logits = loop.model.lm_head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loop.note_mean(loss)
        loop.engine.backward(loss)
        loop.engine.step()
    with torch.no_grad():
        loop.note_mean(loop.compute_loss(VALIDATION))


def keep_a_moving_average(loop: Loop) -> None:
    average = [p.detach().clone() for p in loop.model.parameters()]
    for number in range(2):
        loop.engine.backward(loop.compute_loss(number))
        loop.engine.step()
        with torch.no_grad():
            loop.note_mean(loop.compute_loss(VALIDATION))
        for mean, parameter in zip(average, loop.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.3)
    for mean, parameter in zip(average, loop.model.parameters(), strict=True):
        parameter.data.copy_(mean)
    with torch.no_grad():
        loop.note_mean(loop.compute_loss(VALIDATION))


def copy_the_model(loop: Loop) -> None:
    copied = copy.deepcopy(loop.model)
    for number in range(2):
        loop.engine.backward(loop.compute_loss(number))
        loop.engine.step()
        for mean, parameter in zip(copied.parameters(), loop.model.parameters(), strict=True):
            mean.data.lerp_(parameter.detach(), 0.3)
    with torch.no_grad():
        loop.note_mean(copied(**loop.get_batch(VALIDATION))["loss"])


def swap_weights(loop: Loop) -> None:
    """A moving average, in the model's place while it is evaluated."""
    loop.engine.backward(loop.compute_loss(0))
    loop.engine.step()
    average = [torch.zeros_like(p) for p in loop.model.parameters()]
    for mean, parameter in zip(average, loop.model.parameters(), strict=True):
        parameter.data, mean.data = mean.data, parameter.data


def swap_weights_beside_another_engine(loop: Loop) -> None:
    """Whose fused loss looks at who takes ``p.data``."""
    other = RapidformerEngine(args={**SETTINGS, "fused_loss": "on"})
    model = build_model("small-gpt2")
    other.compose(model, make_sgd(model), keep_rate)
    swap_weights(loop)


def replace_a_modules_weight(loop: Loop) -> None:
    """Read from its module, a split weight is a stand-in: what is set on it goes to the weight."""
    layer = loop.model.transformer.h[0].mlp.c_fc
    loop.engine.backward(loop.compute_loss(0))
    del layer.bias.grad
    assert dict(loop.model.named_parameters())["transformer.h.0.mlp.c_fc.bias"].grad is None
    layer.bias.requires_grad = False
    assert not dict(loop.model.named_parameters())["transformer.h.0.mlp.c_fc.bias"].requires_grad
    layer.weight.data = torch.zeros(layer.weight.shape)


def average_whole_weights(loop: Loop) -> None:
    """torch's own average, which cannot copy a sharded model."""
    average = torch.optim.swa_utils.AveragedModel(build_model("small-gpt2"))
    for number in range(2):
        loop.engine.backward(loop.compute_loss(number))
        loop.engine.step()
        whole = [loop.engine.model.gather_weight(p).detach() for p in loop.model.parameters()]
        average.update_parameters(nn.ParameterList(whole))
    with torch.no_grad():
        loop.note_mean(average(**loop.get_batch(VALIDATION))["loss"])


def test_weights_parts_and_averages_of_a_split_model() -> None:
    sharded = [zero(1), zero(2), zero(3)]
    runs = [(case, layout, GPT2) for case in (penalise_weights, call_the_embedding,
            keep_a_moving_average) for layout in [*sharded, TENSOR]]  # fmt: skip
    runs += [(call_the_parts, layout, GPT2) for layout in sharded]
    runs += [(average_whole_weights, layout, GPT2) for layout in [zero(1), zero(3), TENSOR]]
    runs += [(copy_the_model, layout, GPT2) for layout in ({}, TENSOR)]
    runs += [(swap_weights, {}, GPT2)]
    runs += [(penalise_shards, layout, GPT2) for layout in ({}, TENSOR)[: 1 + CAN_JOIN_FUSED]]
    assert_same(runs)


def test_shards_in_a_loss_and_copies_of_a_sharded_model_are_refused() -> None:
    layouts = [zero(1), zero(3)] if CAN_JOIN_FUSED else [zero(1), zero(3), TENSOR]
    runs = [(penalise_shards, layout, GPT2) for layout in layouts]
    runs += [(copy_the_model, zero(stage), GPT2) for stage in (1, 3)]
    clipped = [(clip_while_accumulating, layout, GPT2) for layout in ({}, zero(1), zero(3), TENSOR)]
    clipped += [(clip_values_while_accumulating, layout, GPT2) for layout in (zero(3), TENSOR)]
    replaced = [(swap_weights, layout, GPT2) for layout in (zero(1), zero(3), TENSOR)]
    for case in (replace_a_modules_weight, swap_weights_beside_another_engine):
        replaced += [(case, layout, GPT2) for layout in (zero(3), TENSOR)]
    results = run_on_ranks(runs + clipped + replaced)
    results, refused = results[: -len(replaced)], results[-len(replaced) :]
    for outcome in itertools.chain(*refused):
        assert "Copy the values: p.data.copy_(tensor)" in outcome.error
    outcomes = results[: len(runs)]
    for outcome in itertools.chain(*results[len(runs) :]):
        assert "Clip with engine.clip_grad_norm(max_norm)" in outcome.error
    for ranks in outcomes[: len(layouts)]:
        assert all("Gather each of them in the loss: sum(engine.model.gather_weight(p)" in o.error
                   for o in ranks)  # fmt: skip
    for ranks in outcomes[len(layouts) :]:
        assert all("For a moving average, copy the shards after compose()" in o.error
                   for o in ranks)  # fmt: skip


class ScaledModel(PlainModel):
    """Learns how large its logits are, like CLIP: a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, input_ids: torch.Tensor, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(input_ids, **batch)["logits"] * self.scale.exp()
        labels = batch["labels"].flatten()
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels)}


def make_scaled() -> nn.Module:
    torch.manual_seed(7)
    return ScaledModel()


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def test_a_parameter_that_is_a_single_number_is_trained_under_sharding() -> None:
    """``fully_shard`` refuses it."""
    options = {"make_model": make_scaled, "make_optimizer": make_adam}
    cases = [penalise_weights, halve_and_clip]
    assert_same([(case, zero(stage), options) for case in cases for stage in (1, 2, 3)])


# ---- gradient penalties --------------------------------------------------------------------------


def make_eager_gpt2() -> nn.Module:
    """Fused attention has no second derivative."""
    model = build_model("small-gpt2")
    model.set_attn_implementation("eager")
    return model


GPT2_EAGER = {"make_model": make_eager_gpt2}


def _differentiate(loop: Loop, number: int, reduction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss and the gradient of its rows' embeddings, to be differentiated again."""
    batch = loop.get_batch(number)
    embedded = loop.model.get_input_embeddings()(batch.pop("input_ids"))
    outputs = loop.model(inputs_embeds=embedded, **batch)
    rows = outputs.logits.logsumexp(-1).sum() if reduction == "sum" else outputs.loss
    (gradient,) = torch.autograd.grad(rows, embedded, create_graph=True)
    return outputs.loss, gradient


def penalise_the_gradient_of_a_mean(loop: Loop) -> None:
    loss, gradient = _differentiate(loop, 0, "mean")
    loop.engine.backward(loss + gradient.pow(2).sum())


def penalise_gradients_by_row(loop: Loop) -> None:
    for number in range(2):
        with loop.engine.model.gradients_by_row():
            loss, gradient = _differentiate(loop, number, "sum")
        loop.engine.backward(loss + gradient.pow(2).sum(-1).mean())
        loop.engine.step()


def test_a_gradient_penalty_by_row_is_exact_under_data_parallelism() -> None:
    assert_same([(penalise_gradients_by_row, {}, GPT2_EAGER)])


def test_other_gradient_penalties_are_refused() -> None:
    layouts = {"over 2 data-parallel ranks": {}, "ZeRO/FSDP": zero(2)}
    runs = [(penalise_the_gradient_of_a_mean, layout, GPT2_EAGER) for layout in layouts.values()]
    runs += [(penalise_gradients_by_row, zero(3), GPT2_EAGER)]
    for ranks, words in zip(run_on_ranks(runs), [*layouts, "ZeRO/FSDP"], strict=True):
        for outcome in ranks:
            assert outcome.error.startswith("TrainingError: torch.autograd.grad("), outcome.error
            assert words in outcome.error
    alone = run_case(penalise_the_gradient_of_a_mean, {}, **GPT2_EAGER)
    assert not alone.error, "in one process there is nothing to refuse"


# ---- a depth that depends on the data ------------------------------------------------------------


class ShallowModel(PlainModel):
    """Leaves after its first block where the first token is odd."""

    def forward(self, input_ids: torch.Tensor, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for number, layer in enumerate(self.layers):
            if number == 0 or not self.may_leave or int(input_ids[0, 0]) % 2 == 0:
                hidden = layer(hidden)
        loss = nn.functional.cross_entropy(
            self.head(hidden).flatten(0, 1), batch["labels"].flatten()
        )
        return {"loss": loss}


def make_shallow_model() -> nn.Module:
    torch.manual_seed(7)
    model = ShallowModel()
    model.may_leave = False
    return model


def leave_early(loop: Loop) -> None:
    """All ranks meet an odd token at once, so that none is left waiting for another."""
    loop.engine.backward(loop.compute_loss(0))
    loop.engine.step()
    loop.model.may_leave = True
    odd = torch.ones(2, 6, dtype=torch.long)
    loop.engine.backward(loop.model(input_ids=odd, attention_mask=odd, labels=odd)["loss"])


def test_a_depth_that_depends_on_the_data_is_refused() -> None:
    options = {"make_model": make_shallow_model}
    runs = [(leave_early, zero(stage), options) for stage in (1, 3)]
    for ranks in run_on_ranks(runs):
        for outcome in ranks:
            assert outcome.error.startswith("ModelError: the model ran no further block, but an")
            assert "ran layers.1: its depth depends on the data" in outcome.error
