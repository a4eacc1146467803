"""Checkpoints: the whole state comes back bit for bit, and what is not whole is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.optimization import Adafactor

from rapidformer.checkpoint import saving
from rapidformer.checkpoint.finding import TRACKER, find_checkpoint, find_checkpoints
from rapidformer.checkpoint.loading import load_checkpoint
from rapidformer.checkpoint.state import get_random_states, set_random_states
from rapidformer.errors import CheckpointError
from rapidformer.log import configure_logging

from .run import Model, Run, save_checkpoint


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run's folder with one checkpoint of step 3."""
    run = Run()
    run.train(3)
    save_checkpoint(tmp_path, run.state, {"note": "hello"})
    return tmp_path


def load(source: Path, run: Run | None = None, **options: bool) -> Run:
    run = run or Run(seed=99)
    state = run.state
    load_checkpoint(source, state, **options)
    run.step = state.step
    return run


# ---- the whole state ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adam", "bf16", "sgd", "adafactor", "muon"])
def test_resumed_run_is_bit_equal(kind: str, tmp_path: Path) -> None:
    run = Run(kind=kind)
    run.train(3)
    save_checkpoint(tmp_path, run.state, {})
    expected = run.train(6)  # across the end of the epoch, with dropout
    torch.manual_seed(1)
    resumed = load(tmp_path, Run(seed=99, kind=kind))
    assert resumed.step == 3
    assert resumed.train(6) == expected
    for name, value in run.weights().items():
        assert torch.equal(resumed.weights()[name], value), name
    assert resumed.scheduler.get_last_lr() == run.scheduler.get_last_lr()
    assert resumed.scaler.state_dict() == run.scaler.state_dict()


def test_a_state_of_plain_numbers_is_saved_as_well(tmp_path: Path) -> None:
    """transformers' Adafactor counts its steps in them: a resumed run began to count again."""

    def make_run(seed: int) -> Run:
        model = Model()
        fixed = {"scale_parameter": False, "relative_step": False}
        return Run(
            seed=seed, model=model, optimizer=Adafactor(model.parameters(), lr=0.05, **fixed)
        )

    run = make_run(0)
    run.train(3)
    save_checkpoint(tmp_path, run.state, {})
    expected = run.train(3)
    resumed = load(tmp_path, make_run(99))
    assert resumed.train(3) == expected
    assert {values["step"] for values in resumed.optimizer.state.values()} == {6}


@pytest.mark.parametrize("save_at", [0, 2], ids=["before the first update", "later"])
def test_saving_changes_nothing_in_the_run(save_at: int, tmp_path: Path) -> None:
    """torch fills an empty optimizer state by a step: Adam would count it as an update."""
    plain = Run()
    expected = plain.train(6)
    saving = Run()
    losses = saving.train(save_at)
    save_checkpoint(tmp_path, saving.state, {})
    assert losses + saving.train(6 - save_at) == expected
    for name, value in plain.weights().items():
        assert torch.equal(saving.weights()[name], value), name


def test_checkpoint_of_a_fresh_run_resumes_bit_equal(tmp_path: Path) -> None:
    run = Run()
    save_checkpoint(tmp_path, run.state, {})
    uninterrupted = Run()
    expected = uninterrupted.train(4)
    resumed = load(tmp_path)
    assert resumed.train(4) == expected
    for name, value in uninterrupted.weights().items():
        assert torch.equal(resumed.weights()[name], value), name


def test_model_with_a_parameter_that_was_never_used_can_be_resumed(tmp_path: Path) -> None:
    """It has no gradient, so the optimizer has no state for it (a BERT's unused pooler, say)."""
    run = Run(model=Model(has_unused=True))
    run.train(3)
    save_checkpoint(tmp_path, run.state, {})
    expected = run.train(2)
    resumed = load(tmp_path, Run(seed=5, model=Model(has_unused=True)))
    assert resumed.train(2) == expected
    for name, value in run.weights().items():
        assert torch.equal(resumed.weights()[name], value), name


def test_frozen_parameters_come_back(tmp_path: Path) -> None:
    run = Run(model=Model())
    run.model.first.requires_grad_(False)
    run = Run(model=run.model)
    run.train(2)
    save_checkpoint(tmp_path, run.state, {})
    expected = run.train(2)
    other = Model()
    other.first.requires_grad_(False)
    resumed = load(tmp_path, Run(seed=3, model=other))
    assert torch.equal(resumed.model.first.weight, run.model.first.weight)
    assert resumed.train(2) == expected


def test_extra_comes_back(saved: Path) -> None:
    assert load_checkpoint(saved, Run().state) == {"note": "hello"}


def test_only_weights(saved: Path) -> None:
    whole = load(saved)
    fresh = Run(seed=99)
    state = fresh.state
    extra = load_checkpoint(
        saved,
        state,
        with_optimizer=False,
        with_random_states=False,
        with_position=False,
    )
    assert extra == {}
    assert state.step == 0
    assert fresh.loader.state_dict() == {"epoch": 0, "consumed_samples": 0, "samples_per_update": 2}
    assert not fresh.optimizer.state
    assert fresh.scheduler.get_last_lr() == Run().scheduler.get_last_lr()
    for name, value in whole.weights().items():
        assert torch.equal(fresh.weights()[name], value), name


def test_checkpoint_without_optimizer_and_random_states(tmp_path: Path) -> None:
    run = Run()
    run.train(2)
    target = save_checkpoint(
        tmp_path, run.state, {}, with_optimizer=False, with_random_states=False
    )
    assert not list(target.glob("random-*"))
    resumed = load(tmp_path)
    assert resumed.step == 2
    assert not resumed.optimizer.state
    for name, value in run.weights().items():
        assert torch.equal(resumed.weights()[name], value), name


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_schedule_that_goes_step_by_step_comes_back(with_optimizer: bool, tmp_path: Path) -> None:
    """StepLR multiplies the last rate: the rate itself is part of the schedule's state."""

    def make(seed: int) -> Run:
        run = Run(seed=seed)
        run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=2, gamma=0.5)
        return run

    run = make(0)
    run.train(5)
    save_checkpoint(tmp_path, run.state, {}, with_optimizer=with_optimizer)
    resumed = load(tmp_path, make(9))
    for _ in range(4):
        rates = [group["lr"] for group in run.optimizer.param_groups]
        assert [group["lr"] for group in resumed.optimizer.param_groups] == rates
        run.train(1)
        resumed.train(1)
    assert rates[0] == pytest.approx(0.05 / 16)


def test_data_position_continues(saved: Path) -> None:
    run = load(saved)
    assert run.loader.state_dict() == {"epoch": 0, "consumed_samples": 6, "samples_per_update": 2}


# ---- folders -----------------------------------------------------------------------------------


def test_what_a_checkpoint_is_made_of(saved: Path) -> None:
    folder = saved / "iter_0000003"
    assert (saved / TRACKER).read_text() == "3"
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert {"run.json", "random-00000.json", "manifest.json", "state/.metadata"} <= names
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(listed) == names - {"manifest.json"}
    assert [p.name for p in saved.iterdir() if p.name.startswith(".")] == [], "nothing left over"


def test_newest_is_the_one_that_the_tracker_names(tmp_path: Path) -> None:
    run = Run()
    for _ in range(3):
        run.train(1)
        save_checkpoint(tmp_path, run.state, {})
    assert [p.name for p in find_checkpoints(tmp_path)] == [f"iter_000000{i}" for i in (1, 2, 3)]
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000003"
    (tmp_path / TRACKER).write_text("2\n")
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000002"
    assert find_checkpoint(tmp_path / "iter_0000001") == tmp_path / "iter_0000001"
    (tmp_path / TRACKER).write_text("77")
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000003"
    (tmp_path / TRACKER).unlink()
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000003"


def test_folder_without_checkpoints(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path) is None
    (tmp_path / "iter_notes").mkdir()
    assert find_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["release", "broken\x00", "3.5"])
def test_tracker_that_is_not_a_number_is_not_a_crash(content: str, saved: Path) -> None:
    """Megatron writes `release` there; a crash may leave anything."""
    (saved / TRACKER).write_text(content)
    try:
        assert find_checkpoint(saved) == saved / "iter_0000003"
    except CheckpointError as error:
        assert TRACKER in str(error)


def test_steps_of_eight_digits_are_sorted_as_numbers(tmp_path: Path) -> None:
    for step in (9_999_999, 10_000_000):
        (tmp_path / f"iter_{step:07d}").mkdir()
    assert find_checkpoints(tmp_path)[-1].name == "iter_10000000"


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4]), (None, [1, 2, 3, 4])]
)
def test_only_the_newest_are_kept(keep: int | None, left: list[int], tmp_path: Path) -> None:
    run = Run()
    for _ in range(4):
        run.train(1)
        save_checkpoint(tmp_path, run.state, {}, keep=keep)
    assert [int(p.name[5:]) for p in find_checkpoints(tmp_path)] == left
    assert load(tmp_path).step == 4


def test_keeping_few_never_drops_the_one_just_saved(tmp_path: Path) -> None:
    """Resumed from an early checkpoint, a run saves steps below those that are there."""
    run = Run()
    for _ in range(3):
        run.train(10)
        save_checkpoint(tmp_path, run.state, {})
    early = load(tmp_path / "iter_0000010")
    early.train(5)
    save_checkpoint(tmp_path, early.state, {}, keep=2)
    assert (tmp_path / "iter_0000015").is_dir()
    assert load(tmp_path).step == 15


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    run = Run()
    run.train(1)
    save_checkpoint(tmp_path, run.state, {"try": 1})
    save_checkpoint(tmp_path, run.state, {"try": 2})
    assert load_checkpoint(tmp_path, Run().state) == {"try": 2}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", TRACKER]


# ---- what is not whole is refused --------------------------------------------------------------


def find_tensor_file(saved: Path) -> Path:
    return max((saved / "iter_0000003" / "state").glob("*.distcp"), key=lambda p: p.stat().st_size)


def test_missing_file_is_named(saved: Path) -> None:
    path = find_tensor_file(saved)
    path.unlink()
    with pytest.raises(
        CheckpointError, match=f"iter_0000003 is damaged: state/{path.name} is missing"
    ):
        load(saved)


def test_truncated_file_is_named_with_its_sizes(saved: Path) -> None:
    path = find_tensor_file(saved)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size - 10])
    with pytest.raises(
        CheckpointError, match=f"{path.name} has {size - 10} bytes, {size} were written"
    ):
        load(saved)


@pytest.mark.parametrize("name", ["run.json", "random-00000.json", "state/.metadata"])
def test_every_file_is_watched(name: str, saved: Path) -> None:
    with (saved / "iter_0000003" / name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(CheckpointError, match="is damaged"):
        load(saved)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"other": 1}', '{"files": 3}'])
def test_manifest_that_is_missing_or_unreadable(content: str | None, saved: Path) -> None:
    path = saved / "iter_0000003" / "manifest.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=r"manifest.json is missing or unreadable"):
        load(saved)


@pytest.mark.parametrize("name", ["run.json", "random-00000.json", "state/.metadata"])
def test_garbage_of_the_same_size_is_refused(name: str, saved: Path) -> None:
    path = saved / "iter_0000003" / name
    path.write_bytes(b"\x00" * path.stat().st_size)
    with pytest.raises(CheckpointError):
        load(saved)


def test_flipped_bit_in_the_weights_is_refused(saved: Path) -> None:
    """A checkpoint cannot lie: the design asks for hashes beside the sizes."""
    run = load(saved)
    weight = run.model.first.weight.detach().numpy().tobytes()
    path = find_tensor_file(saved)
    content = bytearray(path.read_bytes())
    place = bytes(content).find(weight)
    assert place > 0
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=path.name):
        load(saved)


def test_refused_checkpoint_leaves_the_model_alone(saved: Path) -> None:
    find_tensor_file(saved).unlink()
    run = Run(seed=5)
    before = run.weights()
    with pytest.raises(CheckpointError):
        load(saved, run)
    for name, value in run.weights().items():
        assert torch.equal(value, before[name])
    assert run.loader.state_dict() == {"epoch": 0, "consumed_samples": 0, "samples_per_update": 2}


def test_other_model_is_named_by_shape_and_name(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="another model or optimizer:") as caught:
        load(saved, Run(model=Model(width=6)))
    (line,) = [line for line in str(caught.value).splitlines() if "wrong shape" in line]
    assert line.startswith("  wrong shape (5): first.weight (saved [4, 3], needed [6, 3]), ")
    assert "--allow-partial-load" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"\n  missing \(2\): unused.weight, unused.bias\n"):
        load(saved, Run(model=Model(has_unused=True)))


def test_parameters_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    run = Run(model=Model(has_unused=True))
    run.train(1)
    save_checkpoint(tmp_path, run.state, {}, with_optimizer=False)
    with pytest.raises(CheckpointError, match=r"unexpected \(2\): unused.bias, unused.weight\n"):
        load(tmp_path)


def test_a_partial_load_takes_what_matches(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning")
    run = Run(seed=5, model=Model(width=6, has_unused=True))
    before, same = run.weights(), Run(seed=6)
    load_checkpoint(saved, run.state, allows_partial=True)
    load(saved, same)
    for name, value in run.weights().items():
        is_loaded = name == "last.bias"  # all others are wider now, or new
        assert torch.equal(value, same.weights()[name] if is_loaded else before[name]), name
    text = capsys.readouterr().err
    assert "is loaded in part (--allow-partial-load):" in text
    assert "missing (2): unused.weight, unused.bias" in text and "wrong shape (5)" in text
    states = {name: run.optimizer.state.get(p) for name, p in run.model.named_parameters()}
    assert [name for name, state in states.items() if state] == ["last.bias"]
    loaded = same.optimizer.state[same.model.last.bias]["exp_avg"]
    assert torch.equal(states["last.bias"]["exp_avg"], loaded)
    run.train(1)


def test_other_optimizer_is_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="another model or optimizer"):
        load(saved, Run(kind="sgd"))


def test_other_parameter_groups_take_the_state_by_name(saved: Path) -> None:
    """Settings given now win; what was learnt goes to the parameter of that name."""
    model = Model()
    one_group = torch.optim.AdamW(model.parameters(), lr=0.125)
    run, reference = load(saved, Run(model=model, optimizer=one_group)), load(saved)
    for name, parameter in model.named_parameters():
        expected = reference.optimizer.state[reference.model.get_parameter(name)]
        for key, value in one_group.state[parameter].items():
            assert torch.equal(value, expected[key]), f"{name}.{key}"
    assert run.step == 3


def test_checkpoint_of_an_unknown_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version may write what this one would misread."""
    with monkeypatch.context() as patch:
        patch.setattr(saving, "FORMAT", 9)
        save_checkpoint(tmp_path, Run().state, {})
    with pytest.raises(CheckpointError, match="format 9"):
        load(tmp_path)


def test_copied_checkpoint_is_as_good(
    saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("copy") / "renamed"
    shutil.copytree(saved / "iter_0000003", copy)
    assert load(copy).step == 3


# ---- random states -----------------------------------------------------------------------------


def test_random_states_go_through_json() -> None:
    cpu = torch.device("cpu")
    np.random.randn()  # leaves a second Gaussian waiting
    random.gauss(0, 1)
    text = json.dumps(get_random_states(cpu))
    expected = [torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)]
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    set_random_states(json.loads(text), cpu)
    assert [torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)] == expected


def test_the_newest_whole_checkpoint_of_a_run_is_taken(tmp_path: Path) -> None:
    for steps in (1, 2):
        run = Run()
        run.train(steps) if hasattr(run, "train") else None
        run.state.step = steps
        save_checkpoint(tmp_path, run.state, {"step": steps})
    weights = next((tmp_path / "iter_0000002" / "state").glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-1])
    state = Run().state
    assert load_checkpoint(tmp_path, state) == {"step": 1}
    assert state.loaded_from == tmp_path / "iter_0000001"
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(tmp_path / "iter_0000002", Run().state)


def test_a_tied_weight_is_stored_once_and_restored_by_each_name(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from rapidformer import RapidformerEngine
    from rapidformer.checkpoint.tensors import StoredTensors, load_named, read_saved_shapes

    def compose(seed: int) -> RapidformerEngine:
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=1))
        engine = RapidformerEngine(args={"lr": 0.1, "micro_batch_size": 1, "log_level": "error"})
        engine.compose(model)
        return engine

    first, second = compose(0), compose(1)
    folder = first.save_checkpoint(tmp_path)
    embedding, head = "model.transformer.wte.weight", "model.lm_head.weight"
    stored = StoredTensors(folder / "state").kinds
    assert embedding in stored and head not in stored
    assert read_saved_shapes(folder)[head] == stored[embedding][0] == (64, 8)
    second.load_checkpoint(folder)
    ours, theirs = first.model.parallelized.model, second.model.parallelized.model
    for (name, expected), found in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        assert torch.equal(expected, found), name
    # A stage of a pipeline has the head and not the embedding.
    alone = {head: torch.zeros(64, 8)}
    load_named(alone, folder)
    assert torch.equal(alone[head], ours.state_dict()["lm_head.weight"])
