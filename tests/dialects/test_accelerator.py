"""The engine in Accelerate's words."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertForSequenceClassification, get_linear_schedule_with_warmup

from rapidformer import Accelerator, DeepSpeedPlugin, DistributedType, set_seed
from rapidformer.config import resolve
from rapidformer.dialects.accelerate.settings import build_accelerator_settings
from rapidformer.errors import ConfigurationError, RapidformerError
from tests.dialects.small import make_classifier
from tests.processes import run_in_kept_processes
from tests.small import make_model_folder, make_pair_data

ROWS = 24


def make_parts(batch_size: int = 4, *, shuffle: bool = False, rows: int = ROWS) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs, targets = torch.rand(rows, 3), torch.randint(2, (rows,))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=batch_size, shuffle=shuffle)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05), loader


def get_weights(model: nn.Module) -> list[float]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [float(value) for p in whole for value in p.detach().flatten()]


def train_by_hand(accelerator: Accelerator | None, steps: int, batch_size: int = 4) -> Any:
    """The loop of the documents: the scheduler is made after ``prepare`` and never prepared."""
    model, optimizer, loader = make_parts(batch_size)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, 1, 2 * len(loader))
    rates = []
    for _ in range(2):
        for step, (inputs, targets) in enumerate(loader):
            loss = cross_entropy(model(inputs), targets) / steps
            accelerator.backward(loss) if accelerator is not None else loss.backward()
            if step % steps == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                rates.append(scheduler.get_last_lr()[0])
    return get_weights(model), rates


@pytest.mark.parametrize("steps", [1, 3])
def test_accumulating_by_hand_is_a_plain_loop_to_the_bit(steps: int) -> None:
    assert train_by_hand(Accelerator(cpu=True), steps) == train_by_hand(None, steps)


def _train_by_hand_with(arguments: dict[str, Any]) -> Any:
    return train_by_hand(Accelerator(cpu=True, **arguments), 3, batch_size=2)


def _train_without_sync() -> Any:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*make_parts(batch_size=2))
    for step, (inputs, targets) in enumerate(loader):
        is_last = step % 3 == 2
        with nullcontext() if is_last else model.no_sync():
            accelerator.backward(cross_entropy(model(inputs), targets) / 3)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    return get_weights(model), hasattr(model, "no_sync")


def test_a_prepared_model_has_no_sync_on_two_processes() -> None:
    model, optimizer, loader = make_parts()
    for step, (inputs, targets) in enumerate(loader):
        (cross_entropy(model(inputs), targets) / 3).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    for weights, has_no_sync in run_in_kept_processes(_train_without_sync, 2):
        assert weights == pytest.approx(get_weights(model), abs=1e-6)
        assert not has_no_sync


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_accumulating_by_hand_on_two_processes(stage: int | None) -> None:
    arguments: dict[str, Any] = {}
    if stage == 3:
        arguments["fsdp_plugin"] = object()
    elif stage is not None:
        arguments["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=stage)
    alone, rates = train_by_hand(None, 3)
    for weights, own_rates in run_in_kept_processes(_train_by_hand_with, 2, arguments):
        assert weights == pytest.approx(alone, abs=1e-6)
        assert own_rates == rates


def train_counting(
    accelerator: Accelerator, batch_size: int, *, evaluation_first: bool = False
) -> list[float]:
    model, optimizer, loader = make_parts(batch_size, rows=22)
    if evaluation_first:
        accelerator.prepare(DataLoader(loader.dataset, batch_size=5))
    optimizer, model, loader = accelerator.prepare(optimizer, model, loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(inputs), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return get_weights(model)


def test_accumulate_counts_although_a_model_is_truthy() -> None:
    """An update of three batches is the mean over all their rows, the last and smaller one too."""
    accumulated = train_counting(Accelerator(cpu=True, gradient_accumulation_steps=3), 4)
    assert accumulated == pytest.approx(train_counting(Accelerator(cpu=True), 12), abs=1e-6)
    engine_steps = Accelerator(cpu=True, gradient_accumulation_steps=3)
    train_counting(engine_steps, 4)
    assert engine_steps.engine.updates.clock.updates == 2


def test_an_evaluation_loader_may_be_prepared_first() -> None:
    plain, other = (Accelerator(cpu=True, gradient_accumulation_steps=3) for _ in range(2))
    assert train_counting(plain, 4) == train_counting(other, 4, evaluation_first=True)


def test_a_deepspeed_plugin_counts_without_accumulate() -> None:
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model, optimizer, loader = accelerator.prepare(*make_parts())
    for inputs, targets in loader:
        accelerator.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.engine.updates.clock.updates == ROWS // 4 // 2
    assert accelerator.distributed_type == DistributedType.DEEPSPEED


def test_prepare_returns_the_objects_in_their_order_and_may_be_called_in_parts() -> None:
    model, optimizer, loader = make_parts()
    evaluation = DataLoader(loader.dataset, batch_size=5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator = Accelerator(cpu=True)
    first, second, third = accelerator.prepare(evaluation, optimizer, scheduler)
    assert second is optimizer and third is scheduler and len(next(iter(first))[0]) == 5
    assert accelerator.prepare(model) is model
    accelerator.backward(model(torch.rand(2, 3)).sum())
    optimizer.step()
    assert accelerator.unwrap_model(model) is model


def test_the_warm_up_of_a_scheduler_made_before_prepare_starts_low() -> None:
    model, optimizer, loader = make_parts()
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, 10)
    Accelerator(cpu=True).prepare(model, optimizer, loader, scheduler)
    assert optimizer.param_groups[0]["lr"] == 0.0


def _get_prepared_rates() -> list[float]:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = make_parts(batch_size=2)
    # Counted before prepare, as Accelerate's examples do: there the prepared one moves faster.
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates = []
    for inputs, targets in loader:
        accelerator.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def test_a_prepared_scheduler_ends_with_the_epoch_on_any_number_of_processes() -> None:
    alone, (first, second) = _get_prepared_rates(), run_in_kept_processes(_get_prepared_rates, 2)
    assert first == second == alone[1::2]
    assert first[-1] == 0.0


def _gather_everything() -> Any:
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(torch.arange(7)), batch_size=2)
    loader = accelerator.prepare(loader)
    with torch.no_grad():
        seen = [accelerator.gather_for_metrics({"x": batch}) for (batch,) in loader]
    index = accelerator.process_index
    return (
        torch.cat([each["x"] for each in seen]).tolist(),
        accelerator.gather_for_metrics([f"process {index}"]),
        accelerator.reduce(torch.tensor(float(index)), "mean").item(),
        accelerator.pad_across_processes(torch.ones(index + 1)).tolist(),
        accelerator.num_processes,
        accelerator.is_main_process,
        accelerator.distributed_type,
    )


def test_verbs_between_processes() -> None:
    first, second = run_in_kept_processes(_gather_everything, 2)
    assert first[0] == second[0] == list(range(7))
    assert first[1] == ["process 0", "process 1"]
    assert first[2] == 0.5
    assert first[3] == [1.0, 0.0]
    assert first[4:] == (2, True, DistributedType.MULTI_CPU)
    assert second[5] is False


def _gather_repeated_losses(rows: int, batch_size: int) -> Any:
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(torch.arange(rows)), batch_size=batch_size)
    loader, losses, texts = accelerator.prepare(loader), [], []
    with torch.no_grad():
        for (batch,) in loader:
            repeated, _ = accelerator.gather_for_metrics((batch.max().repeat(batch_size), batch))
            losses += repeated.tolist()
            texts += accelerator.gather_for_metrics([str(int(each)) for each in batch])
    return losses, texts


def test_a_repeated_loss_counts_each_example_once() -> None:
    losses, texts = _gather_repeated_losses(9, 8)
    assert losses == [7] * 8 + [8] and texts == [str(i) for i in range(9)]
    for losses, texts in run_in_kept_processes(_gather_repeated_losses, 2, 5, 2):
        assert losses == [1, 1, 3, 3, 4] and texts == [str(i) for i in range(5)]


@pytest.mark.parametrize("is_stateful", [False, True])
def test_state_is_saved_and_loaded(tmp_path: Path, is_stateful: bool) -> None:
    def run(folder: Path, *, is_second: bool) -> list[float]:
        config = SimpleNamespace(use_stateful_dataloader=is_stateful)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        model, optimizer, loader = make_parts(shuffle=True)
        scheduler = get_linear_schedule_with_warmup(optimizer, 0, len(loader))
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        skipped = 0
        if is_second:
            accelerator.load_state(folder)
            skipped = 3
            if not is_stateful:
                loader = accelerator.skip_first_batches(loader, skipped)
        for step, (inputs, targets) in enumerate(loader, start=skipped):
            accelerator.backward(cross_entropy(model(inputs), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step == 2:
                accelerator.save_state(folder)
        return get_weights(model)

    whole = run(tmp_path, is_second=False)
    assert run(tmp_path, is_second=True) == whole


def test_the_order_of_the_data_follows_the_scripts_seed() -> None:
    def get_order(seed: int) -> list[float]:
        accelerator = Accelerator(cpu=True)
        set_seed(seed)
        loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=20, shuffle=True)
        return next(iter(accelerator.prepare(loader)))[0].tolist()  # type: ignore[no-any-return]

    assert get_order(1) == get_order(1) != get_order(2)


def test_the_scripts_own_flags_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", "--lr", "7", "--run_mode", "train", "--no-such"])
    assert Accelerator(cpu=True).engine.args.lr is None


def test_bad_arguments_are_reported_at_once() -> None:
    with pytest.raises(ConfigurationError) as error:
        Accelerator(
            fp16=True, mixed_precision="bf16", dynamo_plugin=1, log_with="other", colour="red"
        )
    text = str(error.value)
    assert "say different things" in text and "use dynamo_backend" in text and "'colour'" in text
    assert "log_with=other): there is tensorboard" in text and "a tracker object" in text


def test_accumulation_that_two_places_say_differently() -> None:
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=4)
    with pytest.raises(ConfigurationError, match="says 2, deepspeed_plugin says 4"):
        Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=plugin)


def test_accumulation_that_is_not_a_number() -> None:
    with pytest.raises(
        ConfigurationError, match="must be a whole number of at least 1, got 'auto'"
    ):
        Accelerator(gradient_accumulation_steps="auto")


def test_the_content_of_a_deepspeed_file_may_be_given() -> None:
    """Its numbers hold: Accelerate's own defaults must not contradict them."""
    content = {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
    }
    plugin = DeepSpeedPlugin(hf_ds_config=content)
    settings = resolve(build_accelerator_settings({"cpu": True, "deepspeed_plugin": plugin}))
    assert settings.deepspeed is not None and settings.clip_grad == 0.5
    assert settings.gradient_accumulation_steps == 2
    with pytest.raises(ConfigurationError, match="must be what JSON can hold"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={"optimizer": object()}))


def test_accelerates_own_plugin_means_the_same() -> None:
    """It fills its hf_ds_config itself, also if no file was given."""
    accelerate = pytest.importorskip("accelerate")
    plugin = accelerate.DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2)
    settings = build_accelerator_settings({"cpu": True, "deepspeed_plugin": plugin})
    assert settings.deepspeed is None and settings.zero_stage == 2
    assert settings.gradient_accumulation_steps == 2
    content = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {}}}
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=content)
    assert build_accelerator_settings({"deepspeed_plugin": plugin}).deepspeed is not None


# ---- several models -------------------------------------------------------------------------


def distil(batch_size: int = 4, **arguments: Any) -> list[float]:
    """A teacher that is prepared with the student, and not trained."""
    accelerator = Accelerator(cpu=True, **arguments)
    model, optimizer, loader = make_parts(batch_size)
    torch.manual_seed(1)
    teacher = nn.Linear(3, 2)
    before = get_weights(teacher)
    teacher, model, optimizer, loader = accelerator.prepare(teacher, model, optimizer, loader)
    for inputs, _ in loader:
        accelerator.backward((model(inputs) - teacher(inputs).detach()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert get_weights(teacher) == before and accelerator.engine.model.module is model
    return get_weights(model)


def test_a_teacher_on_two_processes_is_as_on_one() -> None:
    for found in run_in_kept_processes(_distil_twice, 2):
        for weights, expected in zip(found, (distil(4), distil(4)), strict=True):
            assert weights == pytest.approx(expected, abs=1e-6)


def _distil_twice() -> tuple[list[float], list[float]]:
    return distil(2), distil(4, split_batches=True)


def test_processes_apart() -> None:
    first, second = run_in_kept_processes(_work_apart, 2)
    assert first == ([0, 1, 2], [0, 1, 2], True, False, ["main", "local"])
    assert second == ([3, 4, 4], [3, 4], True, False, ["local", "last", "one"])


def _work_apart() -> Any:
    accelerator = Accelerator(cpu=True)
    with accelerator.split_between_processes(list(range(5)), apply_padding=True) as padded:
        pass
    with accelerator.split_between_processes({"x": torch.arange(5)}) as part:
        pass
    if accelerator.is_last_process:
        accelerator.set_trigger()
    done = []
    accelerator.on_main_process(done.append)("main")
    accelerator.on_local_process(done.append, accelerator.process_index)("local")
    accelerator.on_last_process(done.append)("last")
    accelerator.on_process(process_index=1)(done.append)("one")
    return (padded, part["x"].tolist(), accelerator.check_trigger(), accelerator.check_trigger(),
            done)  # fmt: skip


def _split_each() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    table = Dataset.from_dict({"x": list(range(4))})
    parts: list[Any] = []
    for inputs in (table, list("abcd"), (1, 2), torch.arange(4), "a prompt", []):
        with accelerator.split_between_processes(inputs, apply_padding=True) as part:
            parts.append(part["x"][:] if isinstance(part, Dataset) else part)
    parts[3] = parts[3].tolist()
    return parts


def test_what_is_split_between_processes() -> None:
    alone = [[0, 1, 2, 3], list("abcd"), (1, 2), [0, 1, 2, 3], "a prompt", []]
    assert _split_each() == alone
    first, second, third = run_in_kept_processes(_split_each, 3)
    assert first == [[0, 1], ["a", "b"], (1,), [0, 1], "a prompt", []]
    # Accelerate pads with the last item of all, not with that of the part.
    assert second == [[2, 3], ["c", "d"], (2,), [2, 3], "a prompt", []]
    assert third == [[3, 3], ["d", "d"], (2,), [3, 3], "a prompt", []]


def test_a_process_alone_does_the_work_of_any() -> None:
    accelerator, done = Accelerator(cpu=True), list[str]()
    accelerator.on_process(process_index=1)(done.append)("any")
    accelerator.on_local_process(local_process_index=1)(done.append)("local")
    assert done == ["any", "local"]


def test_a_scale_of_reduce_is_for_tpus() -> None:
    assert Accelerator(cpu=True).reduce(torch.tensor(2.0), "mean", scale=3.0).item() == 2.0


def test_a_model_is_saved_after_the_end_of_training(tmp_path: Path) -> None:
    """The order of many scripts: the logs are closed first."""
    accelerator, model = Accelerator(cpu=True), make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.end_training()
    accelerator.wait_for_everyone()
    whole = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        tmp_path / "a", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.save_model(model, tmp_path / "b")
    for name in ("a", "b"):
        torch.testing.assert_close(load_file(tmp_path / name / "model.safetensors"), whole)
    uses: list[Callable[[], Any]] = [
        lambda: accelerator.prepare(nn.Linear(1, 1)),
        lambda: accelerator.backward(torch.ones((), requires_grad=True)),
        lambda: accelerator.gather(torch.ones(1)),
        lambda: accelerator.save_state(tmp_path / "c"),
    ]
    for use in uses:
        with pytest.raises(RapidformerError, match=r"end_training\(\) has ended .* this Accel"):
            use()


def test_memory_is_freed_for_the_next_model() -> None:
    accelerator = Accelerator(cpu=True)
    for _ in range(2):
        model, optimizer, loader = accelerator.prepare(*make_parts())
        inputs, targets = next(iter(loader))
        accelerator.backward(cross_entropy(model(inputs), targets))
        accelerator.clip_grad_value_(model.parameters(), 2**-10)
        assert max(float(p.grad.abs().max()) for p in model.parameters()) <= 2**-10
        optimizer.step()
        kept = weakref.ref(model)
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
        gc.collect()
        assert kept() is None


class OwnTracker:
    name = "mine"

    def __init__(self) -> None:
        self.tracker: list[Any] = []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tracker.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.tracker.append((values, step, options))

    def finish(self) -> None:
        self.tracker.append("finished")


def test_trackers(tmp_path: Path) -> None:
    accelerator = Accelerator(
        cpu=True, log_with=["tensorboard", OwnTracker()], project_dir=tmp_path
    )
    with pytest.raises(RapidformerError, match=r"call init_trackers\(\) first"):
        accelerator.get_tracker("mine")
    accelerator.init_trackers("project", {"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=3, log_kwargs={"mine": {"extra": True}})
    accelerator.end_training()
    written = accelerator.get_tracker("mine", unwrap=True)
    assert written == [{"lr": 0.1}, ({"loss": 1.0}, 3, {"extra": True}), "finished"]
    assert hasattr(accelerator.get_tracker("tensorboard", unwrap=True), "add_scalar")
    assert [each.name for each in accelerator.trackers] == ["tensorboard", "mine"]
    with pytest.raises(RapidformerError, match="there is tensorboard, mine"):
        accelerator.get_tracker("wandb")
    assert '"loss": 1.0' in (tmp_path / "metrics.jsonl").read_text()


class PlainTracker:
    """The three methods of ours."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def start(self, run: Any) -> None:
        self.heard.append((run.asked_project, dict(run.settings), run.recall("plain")))
        run.remember("plain", "id-3")

    def log(self, values: Any, step: int | None, **options: Any) -> None:
        self.heard.append((step, dict(values), options))

    def finish(self) -> None:
        self.heard.append("finish")


def test_a_tracker_with_three_methods(tmp_path: Path) -> None:
    """It starts with the first numbers: by then the script has resumed, or not."""
    for earlier in (None, "id-3"):
        tracker = PlainTracker()
        accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=str(tmp_path))
        accelerator.init_trackers("project", {"lr": 0.1})
        accelerator.prepare(*make_parts())
        if earlier is None:
            accelerator.save_state(str(tmp_path / "state"))
        else:
            accelerator.load_state(str(tmp_path / "state"))
        accelerator.log({"a": {"b": torch.tensor(2.0)}}, 5, {"PlainTracker": {"extra": True}})
        assert accelerator.get_tracker("PlainTracker", unwrap=True) is tracker
        accelerator.end_training()
        assert tracker.heard == [
            ("project", {"lr": 0.1}, earlier), (5, {"a/b": 2.0}, {"extra": True}), "finish",
        ]  # fmt: skip


def test_a_model_is_saved_whole(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, _, _ = accelerator.prepare(*make_parts())
    accelerator.save_model(model, tmp_path / "model")
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert saved.keys() == accelerator.get_state_dict(model).keys() == model.state_dict().keys()


def save_sharded(folder: str) -> bool:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    model = make_classifier()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.unwrap_model(model).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def test_save_pretrained_of_a_sharded_model_saves_it_whole(tmp_path: Path) -> None:
    assert run_in_kept_processes(save_sharded, 2, str(tmp_path)) == [True, True]
    saved = BertForSequenceClassification.from_pretrained(tmp_path).state_dict()
    torch.testing.assert_close(dict(saved), dict(make_classifier().state_dict()), rtol=0, atol=0)


SCRIPT = Path(__file__).parent / "scripts" / "accelerate_distribution2.py"
ACCELERATE_YAML = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""


def test_the_script_of_the_document_on_two_processes(
    python: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from rapidformer.cli.main import main

    monkeypatch.setattr(sys, "executable", str(python))
    make_model_folder(tmp_path / "bert")
    make_pair_data(tmp_path / "mrpc", train=20, validation=6)
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE_YAML)
    script = tmp_path / "distribution2.py"
    # One string, so that the lines of two ranks do not mix.
    line = 'print(f"{accelerator} steps {len(train_dataloader)}\\n", end="")\n'
    script.write_text(SCRIPT.read_text() + line)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAPIDFORMER_FLAGS", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    assert main(["launch", "--config", "accelerate.yaml", str(script)]) == 0
    printed = capfd.readouterr().out
    assert "num_processes=2, process_index=0" in printed and "steps 2" in printed


def test_an_accelerate_file_with_several_machines(tmp_path: Path) -> None:
    from rapidformer.config import parse_arguments

    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\n"
        "num_machines: 2\nnum_processes: 8\nmachine_rank: 1\nmain_process_ip: node-a\n"
        "main_process_port: 29501\ndeepspeed_config:\n  zero_stage: 3\n"
        "  gradient_accumulation_steps: 4\n  offload_optimizer_device: none\n"
    )
    args = parse_arguments(["--config", str(path)])
    assert (args.nnodes, args.node_rank, args.nproc_per_node) == (2, 1, 4)
    assert (args.master_addr, args.master_port, args.mixed_precision) == ("node-a", 29501, "bf16")
    assert (args.zero_stage, args.gradient_accumulation_steps) == (3, 4)


def test_an_accelerate_file_that_cannot_be_followed(tmp_path: Path) -> None:
    from rapidformer.config import parse_arguments

    path = tmp_path / "accelerate.yaml"
    path.write_text("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: TPU\nfuture: 1\n")
    with pytest.raises(ConfigurationError) as error:
        parse_arguments(["--config", str(path)])
    text = str(error.value)
    assert "LOCAL_MACHINE" in text and "TPU" in text and "future is not supported" in text
