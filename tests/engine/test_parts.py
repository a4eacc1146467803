"""Each part of the engine, built without the others and without an engine."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rapidformer import RapidformerEngine
from rapidformer.accel.applied import Applied
from rapidformer.accel.assembly import Alone
from rapidformer.accel.parallelize import Parallelized
from rapidformer.accel.precision.precision import choose_precision
from rapidformer.checkpoint.state import TrainingState, bypass_clock
from rapidformer.config import Settings, arguments_from_mapping, resolve
from rapidformer.dist.topology import build_topology
from rapidformer.engine.checkpoints import Checkpoints
from rapidformer.engine.current_batch import CurrentBatch
from rapidformer.engine.data import RunData
from rapidformer.engine.model import RunModel
from rapidformer.engine.optimizing import Wanted
from rapidformer.engine.runtime import Runtime
from rapidformer.engine.updates import Updates
from rapidformer.errors import RapidformerError
from rapidformer.models.plan import find_plan
from rapidformer.optim.update import UpdateClock

CPU = torch.device("cpu")
VERBS = {
    "build_model", "compose", "backward", "run_update", "step", "clip_grad_norm", "accumulate",
    "no_sync", "gather", "save_checkpoint", "load_checkpoint", "export", "explain", "close",
}  # fmt: skip


def make_settings(**values: Any) -> Settings:
    return resolve(arguments_from_mapping({"lr": 0.1, **values}), world_size=1, rank=0)


def make_runtime() -> Runtime:
    sizes = dict.fromkeys(("pipeline", "data", "context", "tensor", "expert"), 1)
    return Runtime(
        device=CPU,
        topology=build_topology("cpu", **sizes),
        precision=choose_precision(None, CPU),
        is_main=True,
    )


def make_clock(rounds: int = 1) -> UpdateClock:
    return UpdateClock(rounds, make_runtime().topology)


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def parallelize(model: nn.Module) -> Parallelized:
    return Parallelized(
        model=model, plan=find_plan(model, None), synchronizer=Alone(), applied=Applied()
    )


def test_the_engine_has_the_documented_verbs_and_four_parts() -> None:
    methods = inspect.getmembers(RapidformerEngine, inspect.isfunction)
    public = {name for name, _ in methods if not name.startswith("_")}
    assert public == VERBS and len(public) <= 14
    assert RapidformerEngine.__mro__ == (RapidformerEngine, object)
    engine = RapidformerEngine(args={"lr": 0.1, "log_level": "error"})
    attributes = {name for name in vars(engine) if not name.startswith("_")}
    assert attributes == {"runtime", "data", "model", "updates", "checkpoints"}


def test_data_alone() -> None:
    clock = make_clock(2)
    args = make_settings(micro_batch_size=2, global_batch_size=4, epochs=3)
    data = RunData(args, make_runtime(), clock, CurrentBatch(clock))
    assert data.get_train_iters() is None, "nothing is known about the data yet"
    loader = data.build_loader([{"x": torch.tensor(float(n))} for n in range(10)], shuffle=False)
    assert data.train_loader is loader and data.get_train_iters() == 9
    samples = [(update, data.list_samples()) for update in data.iterate_updates(loader)]
    assert [listed for _, listed in samples] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    updates = [update for update, _ in samples]
    assert [len(update) for update in updates] == [2, 2, 1]
    assert data.gather(updates[0][1].batch["x"]).tolist() == [2.0, 3.0]
    data.adopt_loader(DataLoader(TensorDataset(torch.rand(8, 1)), batch_size=1), is_training=True)
    assert clock.rounds_per_update == 4, "micro-batches of 1 for a global batch of 4"


def test_data_after_a_resume_with_another_batch_size() -> None:
    clock = make_clock()
    args = make_settings(micro_batch_size=2, epochs=2)
    data = RunData(args, make_runtime(), clock, CurrentBatch(clock))
    loader = data.build_loader([{"x": torch.ones(1)}] * 8)
    assert data.follow_samples(2, 1) is None, "the same size"
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": 4})
    assert data.follow_samples(4, 1) == 2, "what was one update is two"
    assert data.get_train_iters() == 8 - 1


def test_data_says_what_the_batch_would_be_in_one_process() -> None:
    clock = make_clock(2)
    asked = arguments_from_mapping({"lr": 0.1, "micro_batch_size": 8})
    data = RunData(resolve(asked, world_size=2, rank=0), make_runtime(), clock, CurrentBatch(clock))
    loader = data.build_loader([{"x": torch.ones(1)}] * 64)
    assert data.describe_batch(loader) == (
        "32 = 8 micro x 2 data parallel x 2 accumulation (in one process 16; batches of 4 keep it)"
    )
    data.args = resolve(asked.replace("flag", global_batch_size=32), world_size=2, rank=0)
    assert data.describe_batch(loader) == "32 = 8 micro x 2 data parallel x 2 accumulation"


def test_model_alone() -> None:
    current = CurrentBatch(make_clock())
    model = RunModel(make_settings(), make_runtime(), current)
    with pytest.raises(RapidformerError, match=r"call engine\.compose"):
        model.parallelized.settle()
    module = make_model()
    former = model.compose(module)
    assert model.module is module and current.has_model
    assert former == {id(module.weight): "weight", id(module.bias): "bias"}
    assert [id(p) for p in model.parameters] == [id(module.weight), id(module.bias)]
    assert model.gather_weight(module.weight) is module.weight
    with model.evaluating():
        assert not module.training and not torch.is_grad_enabled()
    assert module.training and torch.is_grad_enabled()
    with pytest.raises(RapidformerError, match="already composed"):
        model.compose(make_model())
    model.close(gives_back=True)
    assert model.module is None


def test_updates_alone() -> None:
    """Micro-batches of 1 and 3 rows: the update is that of the 4 rows at once."""
    clock, runtime = make_clock(2), make_runtime()
    updates = Updates(make_settings(clip_grad=0.0), runtime, clock, CurrentBatch(clock))
    module, reference = make_model(), make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(RapidformerError, match=r"call engine\.compose"):
        updates.step()
    updates.start(
        Wanted(optimizer=optimizer),
        parallelize(module),
        list(module.parameters()),
        {id(p): name for name, p in module.named_parameters()},
    )
    rows = torch.rand(4, 3)
    before = module.weight.detach().clone()
    for part in rows.split([1, 3]):
        assert torch.equal(module.weight, before)
        updates.backward(module(part).mean(), weight=len(part))
        updates.step()
    reference(rows).mean().backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    torch.testing.assert_close(module.weight, reference.weight)
    assert clock.updates == 1 and updates.get_learning_rate() == pytest.approx(0.1)


def test_checkpoints_alone(tmp_path: Path) -> None:
    clock, runtime, module = make_clock(), make_runtime(), make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    saved = SimpleNamespace(parallelized=parallelize(module), adapter=None)

    def collect() -> TrainingState:
        return TrainingState(
            model=module,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
            scaler=None,
            loader=None,
            step=clock.updates,
            device=CPU,
            topology=runtime.topology,
            bypass=lambda: bypass_clock(clock),
        )

    checkpoints = Checkpoints(make_settings(), runtime, clock, saved, collect)
    with pytest.raises(RapidformerError, match="nowhere to save"):
        checkpoints.save()
    clock.updates = 7
    folder = checkpoints.save(tmp_path, {"note": "kept"})
    assert folder.name == "iter_0000007" and checkpoints.holds_folder
    before = module.weight.detach().clone()
    with torch.no_grad():
        module.weight.zero_()
    clock.updates = 9
    assert checkpoints.load(tmp_path)["note"] == "kept"
    assert torch.equal(module.weight, before)
    assert clock.updates == clock.first_update == 7 and checkpoints.resumed_from == folder
    checkpoints.release_folder()
    assert not checkpoints.holds_folder
