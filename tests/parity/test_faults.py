"""Faults put into the library on purpose: the comparison must find each, and say where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from rapidformer.accel import data_parallel
from rapidformer.accel.tensor import parallel as tensor_parallel
from rapidformer.accel.tensor import styles as tensor_styles
from rapidformer.engine import backward
from rapidformer.optim.update import UpdateClock
from rapidformer.verification.compare import Comparison, compare
from rapidformer.verification.recorder import Recorder
from tests.parity.harness import Training, run_case, run_one
from tests.processes import run_in_processes

TENSOR = {"tensor_model_parallel_size": 2}


@contextmanager
def dropped_all_reduce() -> Iterator[None]:
    """One weight's gradient is not sent to the other process."""
    build = data_parallel.GradientReducer.__init__

    def build_without_one(self: Any, parameters: Any, group: Any) -> None:
        kept = list(parameters)
        # Each of the two blocks has one such weight.
        wide = [p for p in kept if tuple(p.shape) == (128, 32)]
        build(self, [p for p in kept if p is not wide[1]], group)

    with mock.patch.object(data_parallel.GradientReducer, "__init__", build_without_one):
        yield


@contextmanager
def doubled_tied_gradient() -> Iterator[None]:
    """The gradient of a weight with two uses is counted twice."""
    see = Recorder.after_compose

    def double(self: Recorder, engine: Any) -> None:
        see(self, engine)
        embedding = engine.model.module.get_input_embeddings()
        embedding._parameters["weight"].register_hook(lambda gradient: 2 * gradient)

    with mock.patch.object(Recorder, "after_compose", double):
        yield


@contextmanager
def mean_of_means() -> Iterator[None]:
    """Micro-batches count alike, however many labels they have."""
    add = UpdateClock.add_weight

    def add_one(self: UpdateClock, weight: Any, *, shared_unit: Any) -> Any:
        return add(self, 1.0, shared_unit=shared_unit)

    with mock.patch.object(UpdateClock, "add_weight", add_one):
        yield


def swapped_style(module: str, style: str | None) -> Callable[[], Any]:
    """A layer is split in another way than the plan says."""

    @contextmanager
    def swap() -> Iterator[None]:
        resolve = tensor_parallel._resolve_styles

        def resolve_wrongly(model: nn.Module, plan: Any) -> Any:
            styles = resolve(model, plan)
            if style is None:
                del styles[model.get_submodule(module)]
            else:
                styles[model.get_submodule(module)] = style
            return styles

        with mock.patch.object(tensor_parallel, "_resolve_styles", resolve_wrongly):
            yield

    return swap


@contextmanager
def missing_head_gather() -> Iterator[None]:
    """Each process sees its own part of the logits only."""

    def keep_own(part: torch.Tensor, dim: int, length: int, group: Any) -> torch.Tensor:
        start, end = tensor_styles.get_slice_bounds(length, group)
        return nn.functional.pad(part, (start, length - end))

    with mock.patch.object(tensor_styles, "gather_out", keep_own):
        yield


# fault -> (its context, model, settings)
FAULTS: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "dropped all-reduce": (dropped_all_reduce, "gpt2", {}),
    "doubled tied gradient": (doubled_tied_gradient, "gpt2", {}),
    "mean of means": (mean_of_means, "gpt2", {}),
    "partial norm": (
        swapped_style("model.layers.1.self_attn.q_norm", None), "qwen3", TENSOR,
    ),
    "split side by side": (
        swapped_style("transformer.h.1.attn.c_attn", "colwise"), "gpt2", TENSOR,
    ),
    "missing head gather": (missing_head_gather, "custom", TENSOR),
}  # fmt: skip


def run_alike(model: str) -> Any:
    """One process with the same micro-batches: beside it shows where a forward pass goes wrong."""
    return run_case(Training(model), {})


def run_with_faults() -> dict[str, Any]:
    traces = {}
    for fault, (put_in, model, settings) in FAULTS.items():
        # The engine's own check of the first update would end the run: the comparison is asked.
        with put_in(), mock.patch.object(backward, "check_whole_gradients", lambda *given: None):
            # With the micro-batches of one process, whose blocks are looked at.
            traces[fault] = run_case(Training(model), {"micro_batch_size": 2, **settings})
    return traces


@pytest.fixture(scope="module")
def found() -> dict[str, Comparison]:
    everyone = run_in_processes(run_with_faults, 2)
    return {
        fault: compare(
            run_one(Training(model)),
            [traces[fault] for traces in everyone],
            alike=run_alike(model) if settings else None,
        )
        for fault, (_, model, settings) in FAULTS.items()
    }


@pytest.mark.parametrize(
    ("fault", "parameter", "names"),
    [
        ("dropped all-reduce", "transformer.h.1.mlp.c_proj.weight", 1),
        ("doubled tied gradient", "lm_head.weight", 2),
        ("partial norm", "model.layers.1.self_attn.q_norm.weight", 1),
    ],
)
def test_a_wrong_gradient_is_found_by_its_name(
    fault: str, parameter: str, names: int, found: dict[str, Comparison]
) -> None:
    comparison = found[fault]
    assert not comparison.is_equal
    assert comparison.first is not None
    assert (comparison.first.update, comparison.first.name) == (0, parameter)
    assert comparison.first.value > 0.05
    assert comparison.differing == names, "and no other parameter is blamed"


def test_a_wrong_normalisation_shows_in_every_gradient_and_in_no_loss(
    found: dict[str, Comparison],
) -> None:
    comparison = found["mean of means"]
    assert not comparison.quantities["gradients"].is_equal
    assert comparison.differing > 0.9 * comparison.parameters
    assert comparison.first is not None and comparison.first.update == 0


@pytest.mark.parametrize(
    ("fault", "block", "layer"),
    [
        ("split side by side", "transformer.h.1", "transformer.h.1.attn.c_attn."),
        ("missing head gather", "", "head."),
    ],
)
def test_a_wrong_forward_pass_is_found_where_it_begins(
    fault: str, block: str, layer: str, found: dict[str, Comparison]
) -> None:
    comparison = found[fault]
    assert not comparison.quantities["loss"].is_equal
    assert comparison.first is not None
    assert comparison.block == block
    assert comparison.first.name.startswith(layer), comparison.first
