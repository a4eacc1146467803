"""Dropout after a change of layout: replicas draw different masks, slices of a layer the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rapidformer.engine import RapidformerEngine
from tests.processes import run_in_processes

TENSOR = {"tensor_model_parallel_size": 2}
SHARDED = {"zero_3_memory_optimization": True}
ROUTE: list[tuple[str, dict[str, Any]]] = [
    ("replicas", {}), ("slices", TENSOR), ("replicas", {}), ("slices", TENSOR),
    ("shards", SHARDED), ("replicas", {}),
]  # fmt: skip


def _train(folder: Path, settings: dict[str, Any], load: Path | None) -> list[float]:
    """Load, train one update and save; returns the first random numbers of the update."""
    values = {"lr": 0.01, "global_batch_size": 4, "micro_batch_size": 2, "log_level": "error"}
    engine = RapidformerEngine(args={**values, **settings})
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    rows = [{"input_ids": [i, i + 1, i + 2], "labels": [i, i + 1, i + 2]} for i in range(28)]
    loader = engine.build_data_loader(rows, is_training=True)
    (model, *_) = engine.compose(GPT2LMHeadModel(config))
    if load is not None:
        engine.load_checkpoint(load)
    state = torch.get_rng_state()
    numbers = torch.rand(3).tolist()
    torch.set_rng_state(state)
    update = next(iter(engine.iterate_updates(loader)))
    engine.run_update(lambda batch: model(**batch).loss, update)
    engine.step()
    engine.save_checkpoint(folder)
    return numbers


def _travel(folder: Path) -> list[list[float]]:
    found, load = [], None
    for number, (_, settings) in enumerate(ROUTE):
        found.append(_train(folder / str(number), settings, load))
        load = folder / str(number)
    return found


def test_every_change_of_layout_draws_the_right_masks(tmp_path: Path) -> None:
    """From slices, both replicas got the same masks; to slices, each rank got other ones.

    The latter stopped the run: ranks that draw different masks disagree about whole gradients.
    """
    first, second = run_in_processes(_travel, 2, tmp_path)
    for (kind, settings), mine, other in zip(ROUTE, first, second, strict=True):
        assert (mine == other) == (settings == TENSOR), kind
    assert len({tuple(numbers) for numbers in first}) == len(ROUTE), "none are repeated"
