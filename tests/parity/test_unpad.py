"""Without padding, under every layout that allows it: the result of one padded process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rapidformer import RapidformerEngine
from rapidformer.accel.unpad.calls import Removal
from rapidformer.overlay import get_fact
from rapidformer.verification.recorder import Recorder
from tests.accel.test_unpad import build
from tests.parity.harness import SHORT, check, keep_rate, under, zero
from tests.processes import run_in_kept_processes

ON = {"dynamic_shape": "on"}
TENSOR = {"tensor_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}


def test_in_one_process() -> None:
    check(1, under(ON, "bert", "bert-mlm", "deberta", "gpt2", "gemma4", "t5"))


def test_on_two_processes() -> None:
    """test_data_parallel.py has replicas of other models, test_fused_loss.py stages 1 to 3."""
    cases = [
        *under(ON, "bert"),
        *under({**ON, **zero(1)}, "bert"),
        *under({**ON, **zero(3)}, "gpt2"),
    ]
    check(2, cases + under({**ON, **zero(3, checkpoint_activations=True)}, "t5", "deberta"))


class Removing(Recorder):
    """Also checks that padding was removed to the end: nothing has read it."""

    def after_compose(self, engine: Any) -> None:
        super().after_compose(engine)
        self._removal = get_fact(engine.model.module, Removal)

    def finish(self) -> Any:
        assert self._removal.is_on
        return super().finish()


def test_with_shared_layers_and_rows() -> None:
    """A head that joins its logits, losses over a split vocabulary or tokens, and split tokens."""
    fused: dict[str, Any] = {"fused_loss": "on"}
    layouts = [
        (TENSOR, "gpt2"),
        ({**TENSOR, **fused}, "t5"),
        ({**TENSOR, "sequence_parallel": True}, "llama"),
        (CONTEXT, "bert"),
        ({**CONTEXT, **fused, "checkpoint_activations": True}, "llama"),
    ]
    cases = [case for layout, name in layouts for case in under({**ON, **layout}, name)]
    # One update: its three micro-batches have three sizes, each of which may compile.
    compiled = {**CONTEXT, "compile": True, "compile_backend": "aot_eager"}
    cases += under({**ON, **compiled}, "gpt2", rows=SHORT)
    check(2, [(replace(training, recorder=Removing), settings) for training, settings in cases])


def test_a_loss_that_reads_padding_on_two_processes() -> None:
    """Only the first rank has padding: it alone computes its step again, or never removes it.

    Ranks that share layers all do.
    """
    layouts = [{}, zero(1), zero(3), TENSOR]
    expected = train_reading(build_reading())
    for processes in run_in_kept_processes(train_layouts, 2, layouts):
        for layout, weights in zip(layouts, processes, strict=True):
            for name, weight in weights.items():
                limit = {"rtol": 0, "atol": 2e-6, "msg": f"{layout} {name}"}
                torch.testing.assert_close(torch.tensor(weight), expected[name], **limit)


def build_reading() -> Any:
    return build(AutoModelForCausalLM, "llama")


def train_layouts(layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The weights after two steps of a user's own loop under each layout."""
    return [
        {name: weight.tolist() for name, weight in train_reading(build_reading(), layout).items()}
        for layout in layouts
    ]


def train_reading(model: Any, layout: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([11, 3, 11, 11])
    mask = torch.arange(11) < lengths[:, None]
    ids = torch.arange(5, 49).view(4, 11).masked_fill(~mask, 0)
    labels = ids.masked_fill(~mask, -100)
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = None
    if layout is not None:
        settings = {"clip_grad": 0.0, "log_level": "error", **layout}
        engine = RapidformerEngine(args=settings)
        _, optimizer, _ = engine.compose(model, optimizer, lr_scheduler_fn=keep_rate)
        topology = engine.runtime.topology
        rank, rows = topology.get_rank("data"), 4 // topology.data
        batch = {name: value[rows * rank : rows * (rank + 1)] for name, value in batch.items()}
    for _ in range(2):
        loss = model(**batch).logits.pow(2).mean((1, 2)).mean()
        loss.backward() if engine is None else engine.backward(loss, weight=float(len(labels)))
        optimizer.step()
        optimizer.zero_grad()
    if engine is None:
        return {name: p.detach() for name, p in model.named_parameters()}
    assert get_fact(model, Removal).is_on is (rank == 1 or engine.args.zero_stage > 0)
    return {
        name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }
