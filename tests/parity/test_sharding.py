"""State split over some processes with copies on others, or kept in the host's memory: as in one.

Several cases go through one group of processes; ``python tests/parity/matrix.py`` runs them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from rapidformer.accel import weights
from rapidformer.accel.sharding.zero import apply_sharding
from rapidformer.dist.topology import build_lone_mesh
from rapidformer.engine import RapidformerEngine
from rapidformer.models.build import build_pretrained
from rapidformer.models.deferred import get_deferred
from rapidformer.models.plan import find_plan, find_tied
from rapidformer.optim.optimizers import group_parameters
from rapidformer.verification.recorder import collect_weights, count_bytes
from rapidformer.verification.trace import Trace
from tests.parity.harness import (
    PADDED,
    SHORT,
    Case,
    Settings,
    Training,
    check_case,
    compose,
    cut_updates,
    make_adamw,
    make_sgd,
    run_one,
    train,
    zero,
)
from tests.parity.limits import SHARD_LIMITS, get_bytes, get_losses
from tests.parity.models import MODELS, build_model, build_rows, collate
from tests.parity.resuming import ADAM
from tests.processes import run_in_kept_processes


@dataclass
class Result:
    """What a process has seen of a case."""

    trace: Trace
    state_bytes: int
    """Of the optimizer's moments, in this process."""


def run_cases(cases: list[Case]) -> list[Result]:
    results = []
    for training, settings in cases:
        engine, model, loader = compose(training, settings)
        trace = train(engine, model, loader)
        moments = [
            m for s in engine.updates.optimizer.state.values() for m in s.values() if m.dim()
        ]
        results.append(Result(trace, sum(map(_count, moments))))
    engine.close()
    return results


def _count(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def check(
    world_size: int, layouts: list[tuple[str, Settings]], make_optimizer: Any, share: float
) -> None:
    """Compare every process's view of every case with one process, and what it holds of it."""
    rows = [12, *[SHORT] * (len(layouts) - 1)]
    cases = [
        (Training(name, make_optimizer=make_optimizer, rows=count), more)
        for count, (name, more) in zip(rows, layouts, strict=True)
    ]
    everyone = run_in_kept_processes(run_cases, world_size, cases)
    moments = 2 if make_optimizer is make_adamw else 1
    for (training, settings), results in zip(cases, zip(*everyone, strict=True), strict=True):
        where = f"{training.model} under {settings}"
        check_case(training, [result.trace for result in results], SHARD_LIMITS, where=where)
        size = share * get_bytes(run_one(training))
        for result in results:
            assert get_bytes(result.trace) == pytest.approx(size, rel=0.03), where
            assert result.state_bytes == pytest.approx(moments * size, rel=0.03), where


def test_copies_of_split_state_equal_one_process() -> None:
    """Two by two: state is halved, gradients are summed over all four; accumulation in between."""
    cases = [
        ("gpt2", zero(1, hybrid_sharding_size=2, micro_batch_size=1)),
        ("t5", zero(3, hybrid_sharding_size=2, micro_batch_size=1)),
        ("llama", zero(2, hybrid_sharding_size=2, cpu_offload=True)),
    ]
    check(4, cases, make_sgd, share=1 / 2)


def test_state_in_the_hosts_memory_equals_one_process() -> None:
    """Fused AdamW, which wants tensors of one kind, and clipping of gradients that moved."""
    tensor = {"tensor_model_parallel_size": 2, "cpu_offload": True}
    cases = [
        ("gpt2", zero(1, cpu_offload=True)),
        ("bert-mlm", zero(2, cpu_offload=True)),
        ("qwen3", zero(3, cpu_offload=True)),
        ("llama", tensor),
    ]
    check(2, cases, make_adamw, share=1 / 2)


def test_state_is_a_quarter_on_four_processes() -> None:
    check(
        4, [("llama", zero(stage, micro_batch_size=1)) for stage in (1, 3)], make_sgd, share=1 / 4
    )


def _train_in_16_bits() -> list[Result]:
    fp16 = {"mixed_precision": "fp16", "initial_loss_scale": 2.0**18, "hysteresis": 1}
    bf16 = {"mixed_precision": "bf16"}
    layouts = [zero(2, cpu_offload=o, **more) for more in (fp16, bf16) for o in (0, 1)]
    training = Training("gpt2", layers=1, rows=8, global_batch_size=4)
    return run_cases([(training, settings) for settings in layouts])


def test_offload_changes_nothing_in_16_bits() -> None:
    """Overflows are found and skipped, the scale is undone, all of it in the host's memory."""
    fp16, fp16_offloaded, bf16, bf16_offloaded = (
        result.trace for result in run_in_kept_processes(_train_in_16_bits, 2)[0]
    )
    assert not np.isfinite(fp16.norms[0]), "the first update must overflow, or nothing is proved"
    assert np.isfinite(fp16.norms[-1])
    for plain, offloaded in ((fp16, fp16_offloaded), (bf16, bf16_offloaded)):
        assert plain.losses == offloaded.losses
        assert plain.norms == offloaded.norms
        assert all(np.array_equal(w, offloaded.weights[k]) for k, w in plain.weights.items())


def _save_and_go_on(folder: str) -> list[Trace]:
    """An offloaded run saves; a plain one of tensor parallelism goes on from it, and back."""
    traces = []
    layouts = [
        zero(2, cpu_offload=True),
        {"tensor_model_parallel_size": 2},
        zero(3, cpu_offload=True),
    ]
    for number, settings in enumerate(layouts):
        engine = RapidformerEngine(args={**PADDED, **ADAM, **settings})
        model = build_model("gpt2")
        loader = engine.data.build_loader(build_rows("gpt2", 16), collate, shuffle=False)
        engine.compose(model)
        if number:
            engine.load_checkpoint(f"{folder}/{number - 1}")
        traces.append(train(engine, model, loader))
        engine.save_checkpoint(f"{folder}/{number}")
    engine.export(f"{folder}/model")
    engine.close()
    return traces


def test_checkpoints_go_into_the_hosts_memory_and_out_again(tmp_path: Path) -> None:
    everyone = run_in_kept_processes(_save_and_go_on, 2, str(tmp_path))
    runs = list(zip(*everyone, strict=True))
    model = build_model("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    optimizer.param_groups.clear()
    for group in group_parameters(model, 0.01):
        optimizer.add_param_group(group)
    rows, losses, step = build_rows("gpt2", 16), [], 0
    for _ in runs:
        for start in range(0, len(rows), 8):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (1 - step / 9)
            loss = model(**collate(rows[start : start + 8]))["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
    assert [x for traces in runs for x in get_losses(*traces)] == pytest.approx(losses, rel=1e-5)
    exported = type(model).from_pretrained(tmp_path / "model")
    for name, weight in collect_weights(exported).items():
        assert np.allclose(weight, runs[-1][0].weights[name], rtol=0, atol=0), name


# ---- weights that never exist whole --------------------------------------------------------------


def _build(layouts: list[dict[str, Any]], names: list[str], folder: str) -> list[Any]:
    """Every model under every layout: built without memory, poisoned, filled."""
    allocate = weights._allocate

    def poison(model: Any, *args: Any) -> None:
        allocate(model, *args)
        with torch.no_grad():
            for parameter in model.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.fill_(torch.nan)

    weights._allocate = poison
    found = []
    for settings in layouts:
        for name in names:
            engine = RapidformerEngine(args={**PADDED, **settings, "load": folder})
            if not engine.is_main:
                torch.rand(3)  # what a process draws for itself must not matter
            if name == "file":
                model = build_pretrained(
                    "AutoModelForSequenceClassification", engine.args, num_labels=3
                )
            else:
                model = engine.build_model(lambda name=name: MODELS[name](0.0, 2))
            assert get_deferred(model) is not None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine.compose(model, optimizer)
            assert get_deferred(model) is None
            buffers = {key: buffer.numpy().copy() for key, buffer in model.named_buffers()}
            count = len(optimizer.param_groups[0]["params"])
            found.append(
                (collect_weights(model), buffers, find_tied(model), count_bytes(model), count)
            )
    engine.close()
    return found


def _build_plainly(name: str, folder: str) -> tuple[Any, ...]:
    engine = RapidformerEngine(args={**PADDED, "load": folder})
    if name == "file":
        model = build_pretrained("AutoModelForSequenceClassification", engine.args, num_labels=3)
    else:
        model = MODELS[name](0.0, 2)
    buffers = {key: buffer.numpy().copy() for key, buffer in model.named_buffers()}
    count = len(list(model.parameters()))
    return collect_weights(model), buffers, find_tied(model), count_bytes(model), count


@pytest.mark.parametrize(
    ("world_size", "layouts", "names"),
    [
        (
            2,
            [zero(3), {"tensor_model_parallel_size": 2}],
            ["gpt2", "t5", "qwen3", "gpt", "custom", "file"],
        ),
        (4, [zero(1, tensor_model_parallel_size=2, cpu_offload=True)], ["gpt2", "file"]),
    ],
)
def test_each_process_makes_its_share_of_the_same_weights(
    world_size: int, layouts: list[dict[str, Any]], names: list[str], tmp_path: Path
) -> None:
    """Fused and tied weights, uneven vocabularies, key/value heads, a new head, drawn and read."""
    build_model("bert-mlm").save_pretrained(tmp_path)
    everyone = run_in_kept_processes(_build, world_size, layouts, names, str(tmp_path))
    for position, name in enumerate(names * len(layouts)):
        values, buffers, ties, size, number = _build_plainly(name, str(tmp_path))
        for found in everyone:
            mine, own_buffers, own_ties, own_size, count = found[position]
            assert own_ties == ties and count == number, name
            assert own_size < 0.68 * size, name
            assert mine.keys() == values.keys()
            for key, value in values.items():
                assert np.array_equal(mine[key], value), (name, key)
            for key, value in buffers.items():
                assert np.array_equal(own_buffers[key], value), (name, key)


def _offload_alone() -> tuple[str, list[float]]:
    model = build_model("gpt2")
    apply_sharding(model, find_plan(model), build_lone_mesh("cpu"), 3, None, offloads=True)
    optimizer = make_sgd(model)
    losses = []
    for rows in cut_updates(Training("gpt2")):
        loss = model(**collate(rows))["loss"]
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return type(next(model.parameters())).__name__, losses


def test_one_process_can_keep_its_state_elsewhere() -> None:
    """What --cpu-offload does on a single GPU: split over nobody, but offloaded."""
    kind, losses = run_in_kept_processes(_offload_alone, 1)[0]
    assert kind == "DTensor"
    assert losses == pytest.approx(get_losses(run_one(Training("gpt2"))), rel=1e-6)
