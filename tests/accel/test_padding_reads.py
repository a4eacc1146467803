"""Losses that read what the model returns for padding: exact in every step, like a bare loop's.

Every case is trained beside a bare PyTorch loop on the padded batch. Whether padding is still
removed at the end shows what the case counted as.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    RobertaConfig,
    RobertaModel,
    RobertaPreTrainedModel,
)

from rapidformer import RapidformerEngine
from rapidformer.accel.unpad import calls
from rapidformer.accel.unpad.calls import Removal
from rapidformer.overlay import find_fact, get_fact
from tests.accel.test_unpad import PAIR, build, make_batch, make_pair
from tests.checkpoint.test_forged import forge

Loss = Callable[[Any, dict[str, Tensor], int], Tensor]
STEPS = 4


def train_bare(model: Any, batch: dict[str, Tensor], compute: Loss) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        loss = compute(model, batch, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_own_loop(model: Any, batch: dict[str, Tensor], compute: Loss, **more: Any) -> list[float]:
    engine = RapidformerEngine(args={"clip_grad": 0.0, "log_level": "error", **more})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, _ = engine.compose(model, optimizer)
    losses = []
    for step in range(STEPS):
        loss = compute(model, batch, step)
        engine.backward(loss, weight=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_library(model: Any, batch: dict[str, Tensor], compute: Loss) -> list[float]:
    args = {"clip_grad": 0.0, "log_level": "error", "micro_batch_size": 4}
    engine = RapidformerEngine(args=args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, *_ = engine.compose(model, optimizer, lr_scheduler_fn=keep_rate)
    rows = [{name: values[row] for name, values in batch.items()} for row in range(4)] * STEPS
    losses: list[float] = []
    loader = engine.data.build_loader(rows, torch.utils.data.default_collate)
    for update in engine.data.iterate_updates(loader):
        step = len(losses)
        results = engine.run_update(lambda b, step=step: (compute(model, b, step), 1.0), update)
        engine.step()
        losses += [float(result.loss) for result in results]
    return losses


def keep_rate(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def check(
    model: Any,
    batch: dict[str, Tensor],
    compute: Loss,
    train: Any = train_own_loop,
    *,
    removes: bool | None,
) -> None:
    """Train beside a bare loop; at the end, padding is still removed, or no more (None: never)."""
    reference = copy.deepcopy(model)
    expected = train_bare(reference, batch, compute)
    losses = train(model, batch, compute)
    assert losses == pytest.approx(expected, rel=2e-7, abs=2e-6)
    for name, parameter in model.named_parameters():
        other = reference.get_parameter(name)
        torch.testing.assert_close(parameter, other, rtol=0, atol=2e-6, msg=name)
    removal = find_fact(model, Removal)
    assert (None if removal is None else removal.is_on) is removes


# ---- terms of a loss that read padding -----------------------------------------------------------


def warm_up(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    outputs = model(**batch)
    return outputs.loss + 0.05 * min(step, 1) * (outputs.logits**2).mean()


def appear(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    outputs = model(**batch)
    term = 0.05 * (outputs.logits**2).mean() if step else 0.0
    loss: Tensor = outputs.loss + term
    return loss


def use_gate(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    outputs = model(**batch)
    return outputs.loss + model.gate * outputs.logits.pow(2).mean() - 0.1 * model.gate


def weigh_by_statistic(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    outputs = model(**batch)
    return outputs.loss * (1 + min(step, 1) * outputs.logits.detach().std())


def weigh_by_item(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    outputs = model(**batch)
    return outputs.loss * (1 + outputs.logits.abs().mean().item())


def read_columns(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    outputs = model(**batch)
    return outputs.loss + 0.1 * outputs.logits[:, 1:].transpose(1, 2).softmax(1).pow(2).mean()


def smooth_all(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    logits = model(**batch).logits
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), batch["input_ids"].view(-1))


def count_words(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    outputs = model(**batch)
    return outputs.loss * (1 + (outputs.logits.argmax(-1) == 3).float().mean())


def hide_nan(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    outputs = model(**batch)
    return outputs.loss + 0.1 * torch.nan_to_num(outputs.logits).pow(2).mean()


def use_function(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    outputs = model(**batch)
    return outputs.loss + 0.1 * Squares.apply(outputs.logits)


def change_in_place(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    logits = model(**batch).logits
    logits[:, :, 7] = -5.0
    logits = logits + 0.0
    logits *= 2.0
    return functional.cross_entropy(logits.view(-1, 60), batch["labels"].view(-1))


def multiply_weights(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    """The loss is finite, and the gradient of the weights that meet NaN would not be."""
    logits = model(**batch).logits
    logits = torch.einsum("blv,vw->blw", logits, model.get_input_embeddings().weight)
    return logits[batch["labels"] != -100].pow(2).mean()


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values.pow(2).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0] / ctx.saved_tensors[0].numel()


READING = [
    warm_up, appear, use_gate, weigh_by_statistic, weigh_by_item, read_columns, smooth_all,
    count_words, hide_nan, use_function, change_in_place, multiply_weights,
]  # fmt: skip


def build_causal() -> Any:
    model = build(AutoModelForCausalLM, "qwen3", use_sliding_window=False)
    model.gate = nn.Parameter(torch.zeros(()))
    return model


@pytest.mark.parametrize("compute", READING)
def test_a_loss_that_reads_padding(compute: Loss) -> None:
    model = build_causal()
    check(model, make_batch(model), compute, removes=False)


@pytest.mark.parametrize("compute", [warm_up, appear, use_gate, read_columns])
def test_in_the_librarys_loop(compute: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(calls, "warn_once", lambda text, **_: said.append(text))
    model = build_causal()
    check(model, make_batch(model), compute, train_library, removes=False)
    first = 2 if compute is appear else 1
    assert len(said) == 1 and f"step {first} reads what the model returns for padding" in said[0]
    assert "losses.masked_fill(~mask, 0)" in said[0]


@pytest.mark.parametrize("compute", [appear, use_gate, read_columns, smooth_all, use_function])
def test_with_logits_that_a_fused_loss_has_not_computed(compute: Loss) -> None:
    model = build_causal()

    def train(*args: Any) -> list[float]:
        return train_own_loop(*args, fused_loss="on")

    check(model, make_batch(model), compute, train, removes=False)


# ---- models that read padding themselves ---------------------------------------------------------


class Pooled(RobertaPreTrainedModel):
    def __init__(self, kind: str) -> None:
        config = RobertaConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=64, num_labels=2, pad_token_id=0,
        )  # fmt: skip
        super().__init__(config)
        self.kind = kind
        self.roberta = RobertaModel(self.config, add_pooling_layer=False)
        self.head = nn.Linear(16, 2)
        self.gate = nn.Parameter(torch.zeros(()))
        if "zero" in kind:
            nn.init.zeros_(self.head.weight)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        hidden = self.roberta(input_ids, attention_mask=attention_mask)[0]
        pooled = {
            "zero head": lambda: hidden.mean(1),
            "gate": lambda: hidden[:, 0] + self.gate * hidden.mean(1),
            "masked": lambda: self.average(hidden, attention_mask),
            "chosen": lambda: hidden[torch.arange(len(hidden)), attention_mask.sum(1) - 1],
        }.get(self.kind, lambda: hidden[:, 0])()
        logits = self.head(pooled)
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        if self.kind == "penalty" and loss is not None:
            loss = loss + 0.1 * (hidden**2).mean()
        return Output(loss, logits)

    @staticmethod
    def average(hidden: Tensor, mask: Tensor) -> Tensor:
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Output(dict[str, Any]):
    def __init__(self, loss: Any, logits: Any) -> None:
        super().__init__(loss=loss, logits=logits)
        self.loss, self.logits = loss, logits


def own_loss(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


@pytest.mark.parametrize(
    ("kind", "removes"),
    [("penalty", False), ("zero head", None), ("gate", None), ("masked", True), ("chosen", True)],
)
@pytest.mark.parametrize("train", [train_own_loop, train_library])
def test_a_model_that_pools_by_itself(kind: str, removes: bool | None, train: Any) -> None:
    torch.manual_seed(0)
    model = Pooled(kind).eval()
    check(model, make_batch(model, "rows"), own_loss, train, removes=removes)


@pytest.mark.parametrize(("start", "removes"), [(-1, None), (0, False), (2, False)])
def test_a_hook_before_compose_and_one_that_comes_later(start: int, removes: bool | None) -> None:
    torch.manual_seed(0)
    model = Pooled("first").eval()

    def add_mean(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output[0] + output[0].mean(1, keepdim=True)
        return output

    def compute(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
        if step == start:
            model.roberta.register_forward_hook(add_mean)
        return own_loss(model, batch, step)

    if start < 0:
        model.roberta.register_forward_hook(add_mean)
    check(model, make_batch(model, "rows"), compute, removes=removes)


def test_evaluation_is_exact() -> None:
    torch.manual_seed(0)
    model = Pooled("first").eval()
    batch = make_batch(model, "rows")
    reference = copy.deepcopy(model)
    RapidformerEngine(args={"log_level": "error"}).compose(
        model, torch.optim.SGD(model.parameters())
    )
    for kind in ("first", "penalty", "zero head"):
        model.kind = reference.kind = kind
        with torch.no_grad():
            found, expected = model(**batch), reference(**batch)
        for name in ("loss", "logits"):
            assert type(found[name]) is Tensor
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
        assert get_fact(model, Removal).is_on is (kind == "first")


# ---- losses that leave padding out ---------------------------------------------------------------


def index_by_mask(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    mask = batch["labels"] != -100
    return functional.cross_entropy(model(**batch).logits[mask], batch["input_ids"][mask])


def fill_by_mask(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    squares = model(**batch).logits.pow(2).mean(-1)
    return squares.masked_fill(batch["attention_mask"] == 0, 0.0).sum()


def choose_by_mask(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    logits = model(**batch).logits[:, 1:].sigmoid()
    mask = batch["attention_mask"][:, 1:, None].bool()
    return torch.where(mask, logits, 0.0).pow(2).mean()


def multiply_by_mask(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    return (model(**batch).logits.logsumexp(-1) * batch["attention_mask"]).sum()


def shift_by_hand(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    logits = model(**batch).logits[..., :-1, :].contiguous()
    labels = batch["labels"][:, 1:].contiguous()
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def shift_without_reduction(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    logits, labels = model(**batch).logits[:, :-1], batch["labels"][:, 1:]
    losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses.sum() / (labels != -100).sum()


def gather_last(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    last = (batch["attention_mask"].sum(1) - 1)[:, None, None].expand(-1, 1, 60)
    return model(**batch).logits.gather(1, last).pow(2).mean()


def log_accuracy(model: Any, batch: dict[str, Tensor], step: int) -> Tensor:
    outputs, mask = model(**batch), batch["labels"] != -100
    is_right = outputs.logits.argmax(-1)[mask] == batch["labels"][mask]
    return outputs.loss * (1 + is_right.float().mean())


MASKED = [
    index_by_mask, fill_by_mask, choose_by_mask, multiply_by_mask, shift_by_hand,
    shift_without_reduction, gather_last, log_accuracy, own_loss,
]  # fmt: skip


@pytest.mark.parametrize("compute", MASKED)
@pytest.mark.parametrize("fused", ["on", "off"])
def test_a_loss_that_leaves_padding_out(compute: Loss, fused: str) -> None:
    model = build_causal()

    def train(*args: Any) -> list[float]:
        return train_own_loop(*args, fused_loss=fused)

    check(model, make_batch(model), compute, train, removes=True)


@pytest.mark.parametrize(
    ("make", "kind", "labels"),
    [
        (AutoModelForMaskedLM, "bert", "tokens"),
        (AutoModelForTokenClassification, "roberta", "kinds"),
        (AutoModelForSequenceClassification, "bert", "rows"),
        (AutoModelForSequenceClassification, "llama", "rows"),
        (AutoModelForSeq2SeqLM, "t5", "pair"),
    ],
)
@pytest.mark.parametrize("train", [train_own_loop, train_library])
def test_a_models_own_loss(make: Any, kind: str, labels: str, train: Any) -> None:
    model = build(make, kind, **(PAIR if labels == "pair" else {}))
    batch = make_pair() if labels == "pair" else make_batch(model, labels)
    check(model, batch, own_loss, train, removes=True)


def test_a_loss_that_is_bad_by_itself_is_not_blamed_on_padding() -> None:
    model = build_causal()
    RapidformerEngine(args={"log_level": "error"}).compose(
        model, torch.optim.SGD(model.parameters())
    )
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    loss = model(**make_batch(model)).logits.pow(2).mean()
    assert loss.isnan() and get_fact(model, Removal).is_on


def test_logits_read_after_the_step() -> None:
    """The call cannot be repeated with the old weights: padding is NaN once, and said."""
    said: list[str] = []
    model = build_causal()
    engine = RapidformerEngine(args={"log_level": "error", "lr": 0.1})
    model, optimizer, _ = engine.compose(model)
    outputs = model(**make_batch(model))
    engine.backward(outputs.loss)
    optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "warn_once", lambda text, **_: said.append(text))
        assert (
            outputs.logits.isnan().any(-1).tolist()
            == (make_batch(model)["attention_mask"] == 0).tolist()
        )
    assert "it was read after optimizer.step()" in said[0]


def start(model: Any, **more: Any) -> tuple[RapidformerEngine, Any]:
    engine = RapidformerEngine(args={"clip_grad": 0.0, "log_level": "error", **more})
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    _, optimizer, _ = engine.compose(model, sgd, lr_scheduler_fn=keep_rate)
    return engine, optimizer


def run_step(engine: RapidformerEngine, optimizer: Any, loss: Tensor) -> None:
    engine.backward(loss, weight=1.0)
    optimizer.step()
    optimizer.zero_grad()


def test_a_second_engine_with_another_loss() -> None:
    """The first loss has shown nothing about the second."""
    model, reference = build_causal(), build_causal()
    batch = make_batch(model)
    train_bare(reference, batch, own_loss)
    train_bare(reference, batch, warm_up)
    train_own_loop(model, batch, own_loss)
    train_own_loop(model, batch, warm_up)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(name), rtol=0, atol=2e-6)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_resumed_run_with_another_loss(is_old: bool, tmp_path: Path) -> None:
    """Nothing about padding is stored, and what older checkpoints say of it is not believed."""
    model, reference = build_causal(), build_causal()
    batch = make_batch(model)
    engine, optimizer = start(model, save=str(tmp_path))
    run_step(engine, optimizer, own_loss(model, batch, 0))
    folder = engine.save_checkpoint()
    run = json.loads((folder / "run.json").read_text())
    assert "padding" not in run
    if is_old:
        run["padding"] = [{"reads_padding": False}]
        forge(folder, lambda staging: (staging / "run.json").write_text(json.dumps(run)))
    resumed = build_causal()
    engine, optimizer = start(resumed, load=str(tmp_path))
    engine.load_checkpoint()
    run_step(engine, optimizer, warm_up(resumed, batch, 1))
    bare = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step, compute in enumerate((own_loss, warm_up)):
        compute(reference, batch, step).backward()
        bare.step()
        bare.zero_grad()
    for name, parameter in resumed.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(name), rtol=0, atol=2e-6)
