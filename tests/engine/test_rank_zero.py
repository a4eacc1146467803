"""``if rank == 0: engine.save_checkpoint(...)``: done if no other rank is needed, else refused."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from rapidformer import RapidformerEngine
from rapidformer.compat.torch_distributed import get_default_store
from rapidformer.dist.attendance import attending
from rapidformer.errors import RapidformerError
from tests.parity.harness import zero
from tests.processes import run_in_kept_processes, run_in_processes

SETTINGS = {"lr": 0.1, "log_level": "error", "optimizer": "sgd", "async_save": "on"}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))


def make_engine(**settings: Any) -> tuple[RapidformerEngine, nn.Module]:
    engine = RapidformerEngine(args={**SETTINGS, **settings})
    model, *_ = engine.compose(make_model())
    return engine, model


def step(engine: RapidformerEngine, model: nn.Module) -> None:
    engine.backward(model(torch.ones(2, 3)).square().mean(), weight=2)
    engine.step()


def copy_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def save_alone(folder: str, then: str) -> list[str]:
    """Rank 0 saves while the others train on, or wait for it; what the checkpoint of all has."""
    engine, model = make_engine()
    step(engine, model)
    engine.save_checkpoint(f"{folder}/all", wait=False)  # in the background
    weights = copy_weights(model)
    if engine.is_main:
        saved = engine.save_checkpoint(f"{folder}/alone")
        engine.save_checkpoint(f"{folder}/all")  # of the same step
        engine.export(f"{folder}/model")
        torch.testing.assert_close(load_file(f"{folder}/model/model.safetensors"), weights)
        assert [path.name for path in saved.glob("random-*")] == ["random-00000.json"]
    if then == "wait":
        dist.barrier()
    step(engine, model)
    last = engine.save_checkpoint(f"{folder}/all")
    engine.load_checkpoint(f"{folder}/alone")
    torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
    step(engine, model)
    assert engine.updates.clock.updates == 2
    dist.barrier()  # before an engine leaves what another one still reads
    return sorted(path.name for path in last.glob("random-*"))


@pytest.mark.parametrize("then", ["train", "wait"])
def test_a_whole_state_needs_no_other_rank(tmp_path: Path, then: str) -> None:
    names = run_in_kept_processes(save_alone, 2, str(tmp_path), then)
    assert names == [["random-00000.json", "random-00001.json"]] * 2


def save_and_leave(folder: str) -> str:
    """The last line of a script: the other rank has ended, or still has something to do."""
    engine, model = make_engine()
    step(engine, model)
    if engine.is_main:
        return engine.save_checkpoint(folder).name
    from rapidformer.dist import attendance

    attendance.stop_roll()  # as at exit
    return ""


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    assert run_in_processes(save_and_leave, 2, str(tmp_path)) == ["iter_0000001", ""]


def save_again_at_once(folder: str) -> str:
    """Rank 0 is interrupted while it asks, and then saves alone what rank 1 has left behind."""
    engine, model = make_engine(**zero(1))
    step(engine, model)
    if engine.is_main:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        # It is told at once where rank 1 is if that has come by then.
        with pytest.raises((KeyboardInterrupt, RapidformerError)):
            engine.save_checkpoint(f"{folder}/interrupted")
        signal.setitimer(signal.ITIMER_REAL, 0)
        with pytest.raises(RapidformerError, match="rank 1 waits in save_checkpoint"):
            engine.save_checkpoint(f"{folder}/alone")
    else:
        time.sleep(1.0)
    return engine.save_checkpoint(f"{folder}/all").name


def test_questions_that_came_to_nothing_leave_the_next_one_alone(tmp_path: Path) -> None:
    assert run_in_processes(save_again_at_once, 2, str(tmp_path)) == ["iter_0000001"] * 2


def save_sharded(folder: str, settings: dict[str, Any]) -> str:
    """What rank 0 is told; then all save, as they should."""
    engine, model = make_engine(**settings)
    step(engine, model)
    message = ""
    if engine.is_main:
        for save in (engine.save_checkpoint, engine.export):
            with pytest.raises(RapidformerError) as error:
                save(f"{folder}/alone")
        message = str(error.value)
    dist.barrier()
    engine.save_checkpoint(f"{folder}/all")
    engine.export(f"{folder}/model")
    whole = engine.checkpoints.gather_weights()
    if engine.is_main:
        torch.testing.assert_close(load_file(f"{folder}/model/model.safetensors"), whole)
    return message


@pytest.mark.parametrize("stage", [1, 3])
def test_a_sharded_state_needs_every_rank(tmp_path: Path, stage: int) -> None:
    message, _ = run_in_kept_processes(save_sharded, 2, str(tmp_path), zero(stage))
    assert message.startswith(f"export('{tmp_path}/alone') was called on rank 0, and not on every")
    assert "rank 1 waits in barrier() (test_rank_zero.py, line " in message
    assert "holds a part of the weights" in message and "call it on all of them" in message


def save_late(folder: str, waiting: str) -> str:
    """Rank 1 waits for rank 2 for longer than a rank takes to count as stuck; then all save."""
    engine, model = make_engine(**zero(1))
    step(engine, model)
    late = dist.new_group([1, 2])
    rank, tensor = dist.get_rank(), torch.ones(1)
    dist.barrier()
    if rank == 2:
        time.sleep(2.5)
    if waiting == "all_reduce" and rank > 0:
        dist.all_reduce(tensor, group=late)
    elif waiting == "recv" and rank == 1:
        dist.recv(tensor, 2)
    elif waiting == "recv" and rank == 2:
        dist.send(tensor, 1)
    return engine.save_checkpoint(folder).name


@pytest.mark.parametrize("waiting", ["all_reduce", "recv"])
def test_a_rank_that_waits_for_another_than_rank_0_still_comes(
    tmp_path: Path, waiting: str
) -> None:
    assert run_in_kept_processes(save_late, 3, str(tmp_path), waiting) == ["iter_0000001"] * 3


def export_again(folder: str) -> None:
    """Rank 0 exports alone; later all do, and rank 0 comes last."""
    engine, model = make_engine()
    step(engine, model)
    if engine.is_main:
        engine.export(folder)
    step(engine, model)
    if engine.is_main:
        time.sleep(0.5)
    engine.export(folder)
    exported = load_file(f"{folder}/model.safetensors")
    torch.testing.assert_close(exported, copy_weights(model), rtol=0, atol=0)


def test_an_export_of_all_is_complete_after_one_of_rank_0_alone(tmp_path: Path) -> None:
    run_in_kept_processes(export_again, 2, str(tmp_path))


def fail_on_first(folder: str) -> str:
    """The error of rank 0's disk, on every rank."""
    engine, _ = make_engine()
    with pytest.raises(RapidformerError) as error:
        engine.export(folder)
    return str(error.value)


def test_an_error_of_rank_0_reaches_those_that_have_come(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = run_in_kept_processes(fail_on_first, 2, str(tmp_path / "file" / "model"))
    assert first == second and "cannot be written: File exists" in first


def call_often(calls: int) -> int:
    """How many more keys the store has after so many calls, to which rank 1 always comes late."""
    make_engine()
    store, before = get_default_store(), 0
    for _ in range(calls + 1):
        if dist.get_rank() == 1:
            time.sleep(0.03)
        with attending("a call", needs_all="it is one of all"):
            pass
        dist.barrier()
        before = before or store.num_keys()
        dist.barrier()
    return int(store.num_keys()) - before


def test_the_store_keeps_no_calls_that_all_have_come_to() -> None:
    assert max(run_in_kept_processes(call_often, 2, 10)) < 10
