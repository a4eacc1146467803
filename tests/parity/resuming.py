"""Runs that continue from one layout to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rapidformer.checkpoint.exporting.export import export
from rapidformer.engine import RapidformerEngine
from rapidformer.verification.compare import compare
from rapidformer.verification.recorder import collect_weights
from rapidformer.verification.trace import Tensors, Trace
from tests.parity.harness import Settings, Training, train
from tests.parity.models import collate
from tests.processes import run_in_kept_processes

ADAM: Settings = {"optimizer": "adam", "adam_eps": 1e-6, "lr": 1e-3, "train_iters": 9}


def continue_run(
    training: Training, settings: Settings, load: str | None, save: str | None
) -> tuple[Tensors, Trace]:
    """Load, train, save and export; returns the weights that were loaded, and the rest."""
    engine = RapidformerEngine(args=training.get_settings({**ADAM, **settings}))
    model = training.build_model()
    loader = engine.data.build_loader(
        training.build_rows(), collate, shuffle=False, is_training=True
    )
    engine.compose(model)
    if load is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(1.0)  # nothing may be right by luck
        engine.load_checkpoint(load)
    loaded = collect_weights(model)
    trace = train(engine, model, loader)
    if save is not None:
        engine.save_checkpoint(save)
        engine.export(f"{save}/model")
    engine.close()
    return loaded, trace


def _continue_on(world_size: int, *args: Any) -> tuple[Tensors, list[Trace]]:
    """What all processes hold together; a stage of a pipeline has some of the names only."""
    if world_size == 1:
        results = [continue_run(*args)]
    else:
        results = run_in_kept_processes(continue_run, world_size, *args)
    return _join([loaded for loaded, _ in results]), [trace for _, trace in results]


def _join(tensors: list[Tensors]) -> Tensors:
    return {name: value for each in tensors for name, value in each.items()}


def check_route(
    training: Training,
    route: list[tuple[int, Settings]],
    model_class: Any,
    folder: Path,
    base: Settings | None = None,
    *,
    is_exported: bool = True,
) -> None:
    """Train from layout to layout: each loads the weights that the last one saved, bit for bit.

    At every stop that changes settings, one process starts from the same checkpoint and must get
    the same losses and updated weights. Moments are compared by their effect on the updated
    weights, which differ if the moments were not loaded. ``is_exported``: whether the checkpoint
    can be exported under the names that it has; its export must have the same weights.
    """
    base, load, before = base or {}, None, None
    for number, (world_size, settings) in enumerate(route):
        save = str(folder / str(number))
        loaded, traces = _continue_on(world_size, training, {**base, **settings}, load, save)
        if settings:
            _, (reference,) = _continue_on(1, training, base, load, None)
            found = compare(reference, traces)
            assert not found.problems, found.problems
            quantities = found.quantities
            assert quantities["loss"].value < 1e-6, settings
            assert quantities["updated weights"].value < 1e-5, settings
        if before is not None:
            _assert_same(loaded, before)
        weights = _join([trace.weights for trace in traces])
        _assert_same(_read_export(model_class, f"{save}/model"), weights)
        if is_exported:
            export(save, f"{save}/from_checkpoint", verify=False)
            _assert_same(_read_export(model_class, f"{save}/from_checkpoint"), weights)
        load, before = save, weights


def _read_export(model_class: Any, folder: str) -> Tensors:
    model: nn.Module = model_class.from_pretrained(folder)
    return collect_weights(model)


def _assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name
