"""Experts shared over processes == one process: losses, every gradient, updated weights, ties.

A mixture's balancing loss is one of a micro-batch, so the reference accumulates the micro-batches
that the processes have.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rapidformer.dist import mpu
from rapidformer.dist.row_exchange import plan_route
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import RapidformerError
from rapidformer.models.gpt import GPTForCausalLM
from tests.parity import tensor_harness
from tests.parity.harness import check_equal, cut_updates, run_bare
from tests.parity.tensor_harness import (
    SETTINGS,
    Trace,
    build_model,
    build_rows,
    collate,
    compare,
    get_gradients,
    get_weights,
    make_adamw,
    make_sgd,
    run_split,
    train,
)
from tests.parity.test_tensor_parallel import FIRST_LIMITS, _constant
from tests.processes import run_in_processes

UPDATES, ROWS = 3, 4
EXPERTS: dict[str, Any] = {
    "expert_model_parallel_size": 2, "global_batch_size": ROWS, "micro_batch_size": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def more_updates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tensor_harness, "UPDATES", UPDATES)
    monkeypatch.setattr(tensor_harness, "ROWS", ROWS)
    yield


def run_micro_batches(name: str, make_optimizer: Any, epochs: int = 1) -> Trace:
    """The bare loop over single rows."""
    updates = [
        [[row] for row in rows] for (rows,) in cut_updates(build_rows(name), tensor_harness.ROWS)
    ]
    return Trace.from_bare(run_bare(build_model(name), updates * epochs, make_optimizer))


def check(
    world_size: int, names: list[str], settings: dict[str, Any], make_optimizer: Any = make_sgd
) -> dict[str, list[Trace]]:
    traces = run_in_processes(run_split, world_size, names, settings, make_optimizer)
    for name in names:
        reference = run_micro_batches(name, make_optimizer).to_recorded()
        mine = [each[name].to_recorded() for each in traces]
        check_equal(reference, mine, first_limits=FIRST_LIMITS)
    return {name: [each[name] for each in traces] for name in names}


def _count_bytes(name: str) -> tuple[int, int]:
    """Of the whole model, and of its experts."""
    model = build_model(name)
    sizes = {key: p.numel() * p.element_size() for key, p in model.named_parameters()}
    return sum(sizes.values()), sum(n for key, n in sizes.items() if ".experts." in key)


def test_two_processes_that_share_experts_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fused AdamW, which wants tensors of one kind, clipping, and rows without any label."""
    monkeypatch.setattr(tensor_harness, "UPDATES", 10)
    traces = check(2, ["gpt-moe", "mixtral"], EXPERTS, make_adamw)
    for name in ("gpt-moe", "mixtral"):
        whole, experts = _count_bytes(name)
        assert all(t.parameter_bytes == whole - experts // 2 for t in traces[name])


def test_groups_that_share_experts_under_data_parallelism() -> None:
    """Experts are summed over those that hold the same, everything else over all four."""
    check(4, ["gpt-moe", "mixtral"], EXPERTS)


def test_shared_experts_under_sharding() -> None:
    traces = check(4, ["gpt-moe"], {**EXPERTS, "zero_3_memory_optimization": True}, make_adamw)
    whole, _ = _count_bytes("gpt-moe")
    assert all(trace.parameter_bytes < 0.26 * whole for trace in traces["gpt-moe"])


def test_shared_experts_and_shared_sequences() -> None:
    """A mixture's loss is one over all tokens of the row, of which each process has a part."""
    settings = {**EXPERTS, "context_parallel_size": 2, "checkpoint_activations": True}
    check(2, ["gpt-moe"], {**settings, "zero_2_memory_optimization": True})


# ---- rows on their way ---------------------------------------------------------------------------


def _send_rows() -> tuple[list[list[float]], list[int], list[list[float]]]:
    engine = RapidformerEngine(args={**SETTINGS, **EXPERTS})
    rank = mpu.get_expert_model_parallel_rank()
    assert mpu.get_expert_model_parallel_world_size() == 2
    group = mpu.get_expert_model_parallel_group()
    assert group is not None
    # Four experts, two of each process; nobody has rows for the third, the second sends one alone.
    counts = torch.tensor([[2, 1, 0, 0], [0, 1, 0, 0]][rank])
    rows = torch.arange(float(counts.sum()))[:, None] + 10 * rank
    route = plan_route(counts, group)
    arrived = route.send(rows)
    returned = route.send_back(arrived * 2)
    engine.close()
    return arrived.tolist(), route.counts.tolist(), returned.tolist()


def test_rows_reach_the_owners_of_their_experts_and_come_back_in_order() -> None:
    first, second = run_in_processes(_send_rows, 2)
    assert first == ([[0.0], [1.0], [2.0], [10.0]], [2, 2], [[0.0], [2.0], [4.0]])
    assert second == ([], [0, 0], [[20.0]])


def _starve(name: str) -> dict[str, np.ndarray]:
    """Rows of one token: most experts get nothing, on one process none does."""
    engine = RapidformerEngine(args={**SETTINGS, **EXPERTS, "global_batch_size": 2})
    model: Any = build_model(name)
    engine.compose(model, make_sgd(model), _constant)
    ids = torch.tensor([[5, 5]])
    engine.backward(model.train()(input_ids=ids, labels=ids).loss)
    gradients = get_gradients(model)
    engine.step()
    engine.close()
    return gradients


@pytest.mark.parametrize("name", ["mixtral", "gpt-moe"])
def test_experts_without_rows_do_not_hold_up_the_others(name: str) -> None:
    first, second = run_in_processes(_starve, 2, name)
    experts = [key for key in first if ".experts." in key]
    assert experts
    for key in experts:
        assert np.array_equal(first[key], second[key])
        assert np.abs(first[key]).sum() > 0


# ---- checkpoints, exports, generating ------------------------------------------------------------


def _continue_run(
    settings: dict[str, Any], load: str | None, save: str | None
) -> tuple[dict[str, np.ndarray], Trace]:
    more = {"optimizer": "adam", "adam_eps": 1e-6, "lr": 1e-3, "train_iters": 90}
    more |= {"global_batch_size": ROWS, "micro_batch_size": 1}
    engine = RapidformerEngine(args={**SETTINGS, **more, **settings})
    model = build_model("gpt-moe")
    loader = engine.build_data_loader(build_rows("gpt-moe")[: 3 * ROWS], collate, shuffle=False)
    engine.compose(model)
    if load is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)  # nothing may be right by luck
        engine.load_checkpoint(load)
    loaded = get_weights(model)
    trace = train(engine, model, loader)
    if save is not None:
        engine.save_checkpoint(save)
        engine.export(f"{save}/model")
    engine.close()
    return loaded, trace


def test_runs_go_on_from_one_layout_of_experts_to_another(tmp_path: Path) -> None:
    """Weights come back bit for bit, moments too (the losses go on alike); exports are whole."""
    zero = {"zero_3_memory_optimization": True}
    route = [(2, EXPERTS), (4, {**EXPERTS, **zero}), (1, {})]
    load, before = None, None
    for number, (world_size, settings) in enumerate(route):
        save = str(tmp_path / str(number))
        if world_size == 1:
            loaded, trace = _continue_run(settings, load, save)
        else:
            loaded, trace = run_in_processes(_continue_run, world_size, settings, load, save)[0]
        if before is not None:
            _, reference = _continue_run({}, load, None)
            assert compare(trace, reference)["loss"][0] < 1e-6
            assert compare(trace, reference)["weight"][0] < 1e-5
            for key, value in before.items():
                assert np.array_equal(loaded[key], value), (number, key)
        exported = get_weights(GPTForCausalLM.from_pretrained(f"{save}/model"))
        for key, value in trace.weights.items():
            assert np.array_equal(exported[key], value), (number, key)
        load, before = save, trace.weights


def _generate(settings: dict[str, Any]) -> list[list[int]]:
    """Every process has another prompt, and is done at another time."""
    engine = RapidformerEngine(args={**SETTINGS, **settings, "train_iters": 3})
    model: Any = build_model("mixtral")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)  # answers far from a tie
    engine.compose(model)
    answers = []
    for prompt in ([5, 6, 7], [9, 10])[mpu.get_data_parallel_rank() :][: 1 if settings else 2]:
        ids = model.eval().generate(
            torch.tensor([prompt]), max_length=9, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        answers.append(ids[0].tolist())
    engine.close()
    return answers


def test_processes_that_share_experts_generate_the_same_text() -> None:
    first, second = run_in_processes(_generate, 2, EXPERTS)
    assert [*first, *second] == _generate({})


# ---- what cannot work ----------------------------------------------------------------------------


def _compose(names: list[str], settings: dict[str, Any]) -> list[str]:
    messages = []
    for name in names:
        try:
            engine = RapidformerEngine(args={**SETTINGS, **settings, "train_iters": 3})
            model = build_model(name)
            is_late = name == "mixtral" and settings["expert_model_parallel_size"] == 2
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine.compose(model, optimizer, lr_scheduler=_constant(optimizer) if is_late else None)
            messages.append("composed")
        except RapidformerError as error:
            messages.append(str(error))
    return messages


def test_experts_that_cannot_be_shared_are_refused_with_the_reason() -> None:
    three = {"expert_model_parallel_size": 3, "global_batch_size": 3, "micro_batch_size": 1}
    messages = run_in_processes(_compose, 3, ["gpt-moe", "llama"], three)[0]
    assert messages[0] == (
        "--expert-model-parallel-size 3 does not divide the 4 experts of "
        "layers.1.feed_forward.experts of GPTForCausalLM: use 1, 2 or 4."
    )
    assert "LlamaForCausalLM has no experts to distribute" in messages[1]
    late = run_in_processes(_compose, 2, ["mixtral"], EXPERTS)[0]
    assert "pass compose() a function, lr_scheduler_fn=" in late[0]
