"""What scripts of Accelerate do besides training: save, name checkpoints, evaluate, look around."""

from __future__ import annotations

import json
import pickle
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from rapidformer import Accelerator, DistributedType, ProjectConfiguration
from rapidformer.errors import CheckpointError, ConfigurationError, RapidformerError
from tests.dialects.test_accelerator import OwnTracker, get_weights, make_parts
from tests.processes import run_in_kept_processes


def test_a_model_that_is_not_trained_is_saved_as_itself(tmp_path: Path) -> None:
    accelerator, teacher = Accelerator(cpu=True), nn.Linear(3, 2)
    model, _, _ = accelerator.prepare(*make_parts())
    accelerator.prepare(teacher)
    for other in (teacher, nn.Linear(4, 4)):
        whole = accelerator.get_state_dict(other)
        torch.testing.assert_close(whole, dict(other.state_dict()), rtol=0, atol=0)
        accelerator.save_model(other, tmp_path / "model")
        torch.testing.assert_close(load_file(tmp_path / "model" / "model.safetensors"), whole)
    assert accelerator.get_state_dict(model).keys() == model.state_dict().keys()


def test_what_is_saved_as_safetensors_is_safetensors(tmp_path: Path) -> None:
    accelerator, path = Accelerator(cpu=True), tmp_path / "x.safetensors"
    weight = torch.rand(3)
    accelerator.save({"a": weight, "b": weight}, path, safe_serialization=True)
    torch.testing.assert_close(load_file(path), {"a": weight, "b": weight}, rtol=0, atol=0)
    with pytest.raises(RapidformerError, match="takes a dictionary of tensors"):
        accelerator.save({"a": 1}, path, safe_serialization=True)
    accelerator.save({"a": 1}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt") == {"a": 1}


def test_checkpoints_are_named_and_only_the_last_are_kept(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    model, optimizer, loader = accelerator.prepare(*make_parts())
    seen = []
    for inputs, targets in loader:
        accelerator.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
        seen.append(get_weights(model))
    assert accelerator.save_iteration == len(seen) == 6
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["checkpoint_4", "checkpoint_5"]
    accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_4")
    assert get_weights(model) == seen[4]
    accelerator.load_state()
    assert get_weights(model) == seen[5]
    project.iteration = 5
    with pytest.raises(RapidformerError, match=r"checkpoint_5 is there already: .*iteration=6"):
        accelerator.save_state()


def test_hooks_see_what_is_saved_and_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, _, _ = accelerator.prepare(*make_parts())

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        Path(folder, "data.json").write_text(json.dumps(list(weights.pop())))

    def load(models: list[nn.Module], folder: str) -> None:
        models.pop().names = json.loads(Path(folder, "data.json").read_text())

    hooks = [
        accelerator.register_save_state_pre_hook(save),
        accelerator.register_load_state_pre_hook(load),
    ]
    accelerator.save_state(tmp_path)
    before = get_weights(model)
    with torch.no_grad():
        model[0].weight.zero_()
    accelerator.load_state(tmp_path)
    assert model.names == list(model.state_dict()) and get_weights(model) == before
    for hook in hooks:
        hook.remove()
    model.names = None
    accelerator.load_state(tmp_path)
    assert model.names is None


def test_what_cannot_be_saved_with_the_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Item at index 1, of type Tensor, has no"):
        Accelerator(cpu=True).register_for_checkpointing(nn.Linear(1, 1), torch.ones(1))
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*make_parts())
    accelerator.register_for_checkpointing(nn.Linear(1, 1))
    with pytest.raises(RapidformerError, match=r"the state of Linear .* save it in a hook"):
        accelerator.save_state(tmp_path)


def test_a_state_of_other_schedulers_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    _, optimizer, _ = accelerator.prepare(*make_parts())
    accelerator.save_state(tmp_path)
    accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer))
    with pytest.raises(CheckpointError, match="with 0 prepared schedulers, and there are 1 now"):
        accelerator.load_state(tmp_path)


def test_a_named_tuple_is_gathered_as_one() -> None:
    class Pair(NamedTuple):
        first: torch.Tensor
        second: list[torch.Tensor]

    pair = Pair(torch.ones(2), [torch.zeros(1)])
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*make_parts())
    found = accelerator.gather(pair)
    assert isinstance(found, Pair)
    torch.testing.assert_close(tuple(found), tuple(pair))


def test_a_model_without_an_optimizer_has_gradients_and_a_state(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = make_parts()
    accelerator.prepare(model)
    inputs, targets = next(iter(loader))
    outputs = model(inputs)
    accelerator.backward(cross_entropy(outputs, targets), retain_graph=True)
    accelerator.backward(outputs.square().mean())
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    outputs = model(inputs)
    (cross_entropy(outputs, targets) + outputs.square().mean()).backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])
    accelerator.save_state(tmp_path)
    with pytest.raises(RapidformerError, match="prepare the optimizer before the first backward"):
        accelerator.prepare(optimizer)


def test_loaders_answer_as_accelerates() -> None:
    accelerator, rows = Accelerator(cpu=True), TensorDataset(torch.arange(10))
    sampler = RandomSampler(rows)
    loader = DataLoader(rows, batch_sampler=BatchSampler(sampler, 4, drop_last=False))
    loader = accelerator.prepare(loader)
    assert loader.sampler is sampler and loader.total_batch_size == 4 and len(loader) == 3

    def read() -> list[int]:
        return [int(row) for (batch,) in loader for row in batch]

    first, second = read(), read()
    assert sorted(first) == list(range(10)) and first != second
    loader.set_epoch(0)
    assert read() == first
    next(iter(loader))
    loader.set_epoch(1)
    assert read() == second


def test_the_rest_of_an_epoch_is_a_loader_of_its_own() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(10)), batch_size=4))
    rest = accelerator.skip_first_batches(loader, 1)
    assert len(rest) == 2 and len(loader) == 3 and rest.total_batch_size == 4
    for each, expected in ((loader, 0), (rest, 4), (rest, 4), (loader, 0)):
        assert [int(row) for (batch,) in each for row in batch] == list(range(expected, 10))


def test_the_order_follows_the_seed_of_the_data() -> None:
    accelerate = pytest.importorskip("accelerate")

    def get_order(seed: int) -> list[int]:
        config = accelerate.DataLoaderConfiguration(data_seed=seed)
        loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=20, shuffle=True)
        prepared = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
        return next(iter(prepared))[0].tolist()  # type: ignore[no-any-return]

    assert get_order(1) == get_order(1) != get_order(2)


def test_a_profile_and_whether_a_step_was_skipped(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    handler = accelerate.utils.ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model, optimizer, loader = accelerator.prepare(*make_parts())
    inputs, targets = next(iter(loader))
    with accelerator.profile() as profiler:
        accelerator.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
    assert optimizer.step_was_skipped is False
    assert any("backward" in event.key.lower() for event in profiler.key_averages())
    assert json.loads((tmp_path / "profile_0.json").read_text())["traceEvents"]


def test_a_tracker_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tracking = pytest.importorskip("accelerate.tracking")

    class Named(OwnTracker):
        requires_logging_directory = True

        def __init__(self, project: str, folder: str, **options: Any) -> None:
            super().__init__()
            self.tracker.append((project, folder, options))

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "mine", Named)
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["mine"])
    with pytest.raises(ConfigurationError, match="there is tensorboard, mine here"):
        Accelerator(cpu=True, log_with="other")
    with pytest.raises(ConfigurationError, match="needs a folder"):
        Accelerator(cpu=True, log_with="mine")
    accelerator = Accelerator(cpu=True, log_with="mine", project_dir=str(tmp_path))
    accelerator.init_trackers("project", {"lr": 0.1}, {"mine": {"entity": "us"}})
    accelerator.log({"loss": 1.0}, step=3)
    written = accelerator.get_tracker("mine", unwrap=True)
    started = ("project", str(tmp_path), {"entity": "us"})
    assert written == [started, {"lr": 0.1}, ({"loss": 1.0}, 3, {})]


def test_a_tracker_that_the_script_has_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("accelerate.tracking")

    class Registered(OwnTracker):
        name = "Registered"
        requires_logging_directory = False

        def __init__(self, project: str, **options: Any) -> None:
            super().__init__()
            self.tracker.append((project, options))

    # What register_tracker_class does.
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, Registered.name, Registered)
    accelerator = Accelerator(cpu=True, log_with="Registered")
    accelerator.init_trackers("project", init_kwargs={"Registered": {"entity": "us"}})
    accelerator.log({"loss": 1.0}, step=3)
    # Without a configuration, none is stored.
    written = accelerator.get_tracker("Registered", unwrap=True)
    assert written == [("project", {"entity": "us"}), ({"loss": 1.0}, 3, {})]


def evaluate(batch_size: int) -> Any:
    """A model and a loader, but no optimizer; gradients are on, and nobody asks for them."""
    from accelerate.state import AcceleratorState

    accelerator = Accelerator(cpu=True)
    model, _, loader = make_parts(batch_size)
    with torch.no_grad():
        model[2].bias += accelerator.process_index  # as a new head, which each process draws
    model, loader = accelerator.prepare(model, loader)
    batches = list(loader)
    outputs = [accelerator.gather_for_metrics(model(inputs)).tolist() for inputs, _ in batches]
    index = accelerator.process_index
    reduced = accelerator.reduce({"x": [torch.tensor([index, 2.0])]}, "max")["x"][0].tolist()
    padded = accelerator.pad_across_processes([torch.ones(index + 1)])[0].tolist()
    refusal = ""
    try:
        model(batches[0][0]).sum().backward()
    except RapidformerError as error:
        refusal = str(error)
    model.zero_grad()
    inputs, targets = next(iter(loader))
    accelerator.backward(cross_entropy(model(inputs), targets))
    gradients = [float(value) for p in model.parameters() for value in p.grad.flatten()]
    with mock.patch("rapidformer.dialects.accelerate.accelerator.warn_once") as warn:
        accelerator.backward(nn.Linear(3, 1)(inputs).sum())  # of a model that is not prepared
    warned = str(warn.call_args)
    state = AcceleratorState()
    shown = (state.num_processes, state.process_index, state.distributed_type)
    return [*chain(*outputs)], gradients, reduced, padded, (refusal, warned), shown


def test_evaluation_without_an_optimizer_is_as_on_one_process() -> None:
    outputs, gradients, *_ = evaluate(4)
    found = run_in_kept_processes(evaluate, 2, 2)
    for rank, (rows, summed, reduced, padded, said, shown) in enumerate(found):
        torch.testing.assert_close(rows, outputs)
        assert summed == pytest.approx(gradients, abs=1e-6)
        assert reduced == [1.0, 2.0] and padded == [1.0, float(rank)]
        assert "prepared without its optimizer" in said[0]
        assert "the loss does not depend on the prepared model" in said[1]
        assert shown == (2, rank, DistributedType.MULTI_CPU)


def test_what_was_prepared_can_be_pickled(python: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    rows = DataLoader(TensorDataset(torch.rand(8, 3)), batch_size=2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, rows)
    for (inputs,) in loader:
        accelerator.backward(model(inputs).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert pickle.loads(pickle.dumps(accelerator)) is accelerator
    copied: Any
    copied, schedule, batches = pickle.loads(pickle.dumps((optimizer, scheduler, loader)))
    assert schedule.optimizer is copied and schedule.get_last_lr() == scheduler.get_last_lr()
    assert [batch[0].tolist() for batch in batches] == [batch[0].tolist() for batch in loader]
    copied.param_groups[0]["params"][0].grad = torch.ones(2, 3)
    copied.step()  # a plain optimizer, which waits for no update
    assert float(copied.state[copied.param_groups[0]["params"][0]]["step"]) == 5
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).is_main_process)"
    elsewhere = subprocess.run(
        [python, "-c", code],
        input=pickle.dumps(accelerator),
        capture_output=True,
        check=True,
    )
    assert elsewhere.stdout.strip() == b"True"


def _train_by_all_labels(second_models: int) -> list[list[float]]:
    """The recipe of Accelerate's documents: the script divides by the labels of all processes."""
    accelerator, rows = Accelerator(cpu=True), []
    torch.manual_seed(0)
    for index in range(4):
        labels = torch.full((5,), -100)
        labels[: index + 1] = index % 2
        rows.append({"inputs": torch.rand(5, 3), "labels": labels})
    models = [nn.Linear(3, 2) for _ in range(1 + second_models)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    size = 4 // accelerator.num_processes
    *_, loader = accelerator.prepare(*models, *optimizers, DataLoader(rows, batch_size=size))
    (batch,) = loader
    total = accelerator.gather(batch["labels"].ne(-100).sum()).sum()
    for model in models:
        logits = model(batch["inputs"]).flatten(0, 1)
        loss = cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / total
        accelerator.backward(loss * accelerator.num_processes, weight=1)
    return [p.grad.flatten().tolist() for model in models for p in model.parameters()]


@pytest.mark.parametrize("second_models", [0, 1])
def test_a_script_may_divide_by_the_labels_of_all_processes(second_models: int) -> None:
    alone = _train_by_all_labels(second_models)
    for found in run_in_kept_processes(_train_by_all_labels, 2, second_models):
        torch.testing.assert_close(found, alone)
