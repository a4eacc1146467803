"""``--cuda-graph`` on a GPU: the same bits as without it.

With deterministic kernels: otherwise two runs without a graph already differ in the last bits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from rapidformer.accel.cuda_graph import graphs
from rapidformer.accel.cuda_graph.capture import CudaCapture
from rapidformer.accel.unpad.calls import Removal
from rapidformer.log import warn_once
from rapidformer.optim import optimizers
from rapidformer.optim.multi_tensor.adamw import MultiTensorAdamW
from rapidformer.overlay import find_fact
from rapidformer.training.callbacks import Callback, Control, RunningLoop
from tests.training import test_cuda_graph as stand_in
from tests.training.test_cuda_graph import (
    Spoiler,
    make_bart,
    make_bert,
    make_gpt2,
    make_hybrid,
    make_pairs,
    make_rows,
    make_t5,
    make_texts,
    make_texts_of_rows,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Run(stand_in.Run):
    """The run of the CPU tests, with real graphs."""

    def __init__(self, model: Any, rows: Any, **settings: Any) -> None:
        settings = {"mixed_precision": "bf16", "cuda_graph": "auto", **settings}
        super().__init__(model, rows, None, **settings)

    def run_and_list(self) -> list[dict[str, Any]]:
        self.train()
        return self.values.lines


def count(run: Run) -> int:
    assert run.engine.updates.graphs is not None
    assert run.engine.updates.graphs.problem is None
    return run.engine.updates.graphs.count


@pytest.fixture(params=["torch", "ours"], autouse=True)
def optimizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With torch's AdamW, which runs after a graph, and with ours, which is part of it."""

    def build(groups: Any, settings: Any, lr: float) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if request.param == "torch" else MultiTensorAdamW
        return kind(groups, lr=lr, fused=True)

    monkeypatch.setattr(optimizers, "_build_adamw", build)
    return str(request.param)


@pytest.mark.parametrize(
    "more",
    [{}, {"global_batch_size": 8}, {"mixed_precision": None}, {"eval_interval": 3}],
    ids=["plain", "accumulated", "fp32", "evaluated"],
)
def test_fixed_shapes(more: dict[str, Any], optimizer: str) -> None:
    off = Run(make_gpt2(), make_texts(48), **more, cuda_graph="off").run_and_list()
    on = Run(make_gpt2(), make_texts(48), **more)
    assert on.run_and_list() == off
    assert count(on) == 1
    assert on.engine.updates.graphs is not None
    assert on.engine.updates.graphs.updates == (optimizer == "ours")


class Changing(Callback):
    """Changes what the code reads: a configuration, a function, a rate of dropout."""

    def __init__(self, run: Any, model: Any) -> None:
        self._run, self._model = run, model

    def on_step_begin(self, loop: RunningLoop, control: Control) -> None:
        if loop.step == 5:
            self._model.config.aux = 0.5
        if loop.step == 8:
            self._run.loss_fn = partial(functional.cross_entropy, label_smoothing=0.2)
        if loop.step == 11:
            self._model.transformer.drop.p = 0.0


class Changed(Run):
    loss_fn: Any = staticmethod(functional.cross_entropy)

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        return self.loss_fn(logits, batch["labels"][:, 1:].flatten()) * model.config.aux


def test_what_the_code_reads_changes_in_mid_run() -> None:
    def run(**more: Any) -> tuple[Any, list[dict[str, Any]]]:
        model = make_gpt2()
        model.config.aux = 1.0
        run = Changed(model, make_texts(64), **more)
        run.callbacks = [run.values, Changing(run, model)]
        return run, run.run_and_list()

    on, lines = run()
    assert count(on) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "MOST_GRAPHS", 0)
        assert run()[1] == lines


@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize(
    ("make", "make_data", "most"),
    [(make_bert, make_rows, 6), (make_bart, make_pairs, 8), (make_t5, make_pairs, 8),
     (partial(make_t5, d_kv=16), make_pairs, 8), (make_hybrid, make_texts_of_rows, 6)],
    ids=["bert", "bart", "t5", "t5 in its own kernel", "qwen3.5"],
)  # fmt: skip
def test_rows_of_different_lengths(
    make: Any, make_data: Any, most: int, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same steps without a graph, with dropout; and against the padded model."""
    more: dict[str, Any] = {"mixed_precision": precision}
    model = make(0.1)
    on = Run(model, make_data(96), **more)
    lines = on.run_and_list()
    removal = find_fact(model, Removal)
    assert removal is not None
    # In fp32, a batch of pairs with more columns has other last bits, so it stays as it is.
    assert removal.has_removed == (precision is not None or make_data is not make_pairs)
    assert 1 < count(on) <= most or not removal.has_removed
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "MOST_GRAPHS", 0)
        never = Run(make(0.1), make_data(96), **more)
        assert never.run_and_list() == lines
        assert count(never) == 0
    off = Run(make(0.0), make_data(32), **more, cuda_graph="off").run_and_list()
    on = Run(make(0.0), make_data(32), **more)
    mine = [line["loss"] for line in on.run_and_list()]
    limit = 2e-2 if precision else 1e-4
    assert mine == pytest.approx([line["loss"] for line in off], rel=limit)


def test_a_resumed_run(tmp_path: Path) -> None:
    rows = make_rows(64, longest=30)  # all of one size
    whole = Run(make_bert(0.1), rows).run_and_list()
    more: dict[str, Any] = {"save": str(tmp_path / "run"), "async_save": False}
    Run(make_bert(0.1), rows, **more, exit_interval=6).run_and_list()
    rest = Run(make_bert(0.1), rows, **more, load=more["save"])
    assert rest.run_and_list() == whole[6:]
    assert count(rest) > 0


def test_a_bad_loss_is_skipped() -> None:
    found = []
    for kind in ("off", "auto"):
        more: dict[str, Any] = {"on_bad_loss": "skip", "log_interval": 2}
        run = Run(make_gpt2(), make_texts(40), **more, cuda_graph=kind)
        run.callbacks = [run.values, Spoiler()]
        found.append(run.run_and_list())
    assert found[0] == found[1]
    assert len(found[0]) > 3


def test_a_failed_recording_says_why_and_does_not_spoil_the_next() -> None:
    capture = CudaCapture(torch.device("cuda", 0))
    value = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="not permitted"):
        capture.record(lambda: value.sum().item())
    result, replay = capture.record(lambda: value * 2)
    value.fill_(3)
    replay()
    assert result.tolist() == [6] * 4


class Waits(Run):
    """Waits for the GPU in every step, which no graph can."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        loss = model(**batch).loss
        loss.item()
        return loss


class WaitsUnnoticed(Run):
    """The same in a way that only shows during a capture."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        loss = model(**batch).loss
        torch.cuda.synchronize()
        return loss


class Branches(Run):
    """Calls nothing that waits, but asks for a value."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        loss = model(**batch).loss
        return loss if loss > 0 else -loss


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Waits, "calls .item(), which waits for the GPU"),
        (WaitsUnnoticed, "calls torch.cuda.synchronize()"),
        (Branches, "a step waits for the GPU, as .item() does (test_cuda_graph.py:"),
    ],
)
def test_a_step_that_cannot_be_captured(kind: type[Run], problem: str) -> None:
    off = kind(make_gpt2(), make_texts(32), cuda_graph="off").run_and_list()
    run = kind(make_gpt2(), make_texts(32))
    assert run.run_and_list() == off
    assert run.engine.updates.graphs is not None
    assert problem in str(run.engine.updates.graphs.problem)


class MeanOverAll(Run):
    """Its loss is a mean over all positions, padded ones included."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        labels = batch.pop("labels")
        logits = model(**batch, labels=labels).logits
        return functional.cross_entropy(logits.mT, labels, reduction="none").mean()


class Later(Run):
    """A term over all positions that has no weight yet."""

    def run_forward_step(self, batch: Any, model: Any) -> Any:
        outputs = model(**batch)
        return outputs.loss + 0.0 * outputs.encoder_last_hidden_state.pow(2).mean()


@pytest.mark.parametrize("kind", [MeanOverAll, Later])
def test_a_loss_that_must_not_get_wider_batches(
    kind: type[Run], caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    off = kind(make_t5(0.1), make_pairs(48), cuda_graph="off").run_and_list()
    assert kind(make_t5(0.1), make_pairs(48)).run_and_list() == off
    assert "so batches keep their widths" in caplog.text


def test_fp32_batches_are_widened_only_if_the_bits_agree() -> None:
    more: dict[str, Any] = {"mixed_precision": None}
    off = Run(make_t5(0.0), make_pairs(48), **more, cuda_graph="off").run_and_list()
    on = Run(make_t5(0.0), make_pairs(48), **more).run_and_list()
    mine = [line["loss"] for line in on]
    assert mine == pytest.approx([line["loss"] for line in off], rel=1e-6)


def test_without_deterministic_kernels_a_graph_is_used_all_the_same() -> None:
    """Their results differ from run to run, and a replay's by no more than that."""
    torch.use_deterministic_algorithms(False)
    for make, rows in ((make_bert, make_rows(96)), (make_t5, make_pairs(96))):
        run = Run(make(0.1), rows)
        run.run_and_list()
        assert count(run) > 1


def test_closing_gives_the_memory_of_graphs_back() -> None:
    run = Run(make_gpt2(), make_texts(48))
    run.run_and_list()
    graphs = run.engine.updates.graphs
    assert graphs is not None
    assert graphs.count == 1
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphs.close()
    assert graphs.count == 0
    assert torch.cuda.memory_reserved() < before
