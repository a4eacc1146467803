"""Checkpoints that somebody has tampered with: one sentence each, and never a hang.

Every forgery here has a manifest whose hashes are right: its files are what the forger wrote.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rapidformer.checkpoint import tensors
from rapidformer.checkpoint.index import Entry, Part, find_index_problems
from rapidformer.checkpoint.loading import load_checkpoint
from rapidformer.checkpoint.publish import publish, start_staging
from rapidformer.errors import CheckpointError

from .run import Run, save_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2."""
    folder, run = tmp_path_factory.mktemp("original"), Run()
    for _ in range(2):
        run.train(1)
        save_checkpoint(folder, run.state, {})
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def forge(run: Path, change: Callable[[Path], Any]) -> Path:
    """A checkpoint, or the newest one of a run, changed and given a new manifest."""
    folder = run if run.name.startswith("iter_") else run / "iter_0000002"
    staging = start_staging(folder)
    staging.rmdir()
    folder.rename(staging)
    (staging / "manifest.json").unlink()
    change(staging)
    publish(folder)
    return folder


def check_refused(folder: Path, message: str) -> None:
    """Refused by name; the run resumes from the checkpoint before."""
    run = Run(seed=9)
    before = run.weights()
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(folder, run.state)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in run.weights().items())
    state = Run().state
    load_checkpoint(folder.parent, state)
    assert state.loaded_from == folder.parent / "iter_0000001"


# ---- the manifest ------------------------------------------------------------------------------


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content["files"])
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["run.json", "state/index.json"])
def test_a_manifest_must_list_what_every_checkpoint_has(name: str, saved: Path) -> None:
    folder = saved / "iter_0000002"
    change_manifest(folder, lambda files: files.pop(name))
    check_refused(folder, f"its manifest.json does not list {name}")


@pytest.mark.parametrize("name", ["../iter_0000001/run.json", "/etc/passwd", "link"])
def test_a_manifest_stays_in_its_folder(name: str, saved: Path) -> None:
    folder = saved / "iter_0000002"
    (folder / "link").symlink_to("/etc/passwd")
    change_manifest(folder, lambda files: files.update({name: {"size": 1, "sha256": ""}}))
    check_refused(folder, f"{name} leads out of the folder")


@pytest.mark.parametrize(
    "name", ["manifest.json", "run.json", "random-00000.json", "state/index.json"]
)
def test_a_named_pipe_is_not_read(name: str, saved: Path) -> None:
    folder = saved / "iter_0000002"
    (folder / name).unlink()
    os.mkfifo(folder / name)
    check_refused(folder, "is missing|holds no checkpoint")


# ---- the index of the tensors ------------------------------------------------------------------


WEIGHT = "model.first.weight"


def change_index(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "state" / "index.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return apply


def change_part(place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["tensors"][WEIGHT]["parts"][0][place] = value

    return change


def repeat_parts(content: dict[str, Any]) -> None:
    """Hundreds of thousands of these took a minute to read."""
    content["tensors"][WEIGHT]["parts"] *= 1000


def change_entry(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["tensors"][WEIGHT].update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_part(1, [3, 3]), f"its parts do not make up the whole of {WEIGHT}"),
        (change_part(0, [1, 0]), f"its parts do not make up the whole of {WEIGHT}"),
        (change_part(0, [0]), f"its parts do not make up the whole of {WEIGHT}"),
        (change_entry("parts", []), f"its parts do not make up the whole of {WEIGHT}"),
        (change_entry("shape", [2**62, 2**62]), "its parts do not make up the whole"),
        (change_part(2, "../../iter_0000001/run.json"), "which is not a file of this folder"),
        (change_part(2, "/dev/zero"), "refers to /dev/zero, which is not a file of this folder"),
        (change_part(2, ".."), "which is not a file of this folder"),
        (change_part(2, "a\0b"), "is malformed|not a file of this folder"),
        (change_part(2, 3), "a file's name is not text"),
        (change_part(4, 10**9), "refers to bytes that .* does not have"),
        (repeat_parts, "several of its parts are the same bytes of"),
        (change_part(3, -1), "not a whole number from 0 on"),
        (change_part(3, 10**30), "not a whole number from 0 on"),
        (change_part(1, [True, 3.0]), "not a whole number from 0 on"),
        (change_part(1, 3), "a size is not a list of numbers"),
        (change_entry("dtype", "load"), "a data type is not one of torch's"),
        (change_entry("parts", 3), "it is malformed"),
        (lambda content: content["tensors"].update({WEIGHT: None}), "it is malformed"),
        (lambda content: content.update(tensors=[1]), "it lists no tensors"),
    ],
)
def test_an_index_that_lies_is_refused(
    change: Callable[[Any], None], message: str, saved: Path
) -> None:
    check_refused(forge(saved, change_index(change)), message)


def test_torchs_own_index_is_not_read(saved: Path) -> None:
    """It is a pickle."""
    folder = forge(saved, lambda folder: (folder / "state" / "index.json").unlink())
    check_refused(folder, "index.json")


def test_a_named_pipe_in_place_of_tensors_is_not_read(saved: Path) -> None:
    folder = forge(saved, change_index(change_part(2, "pipe")))
    os.mkfifo(folder / "state" / "pipe")
    check_refused(folder, "refers to pipe, which is not a file of this folder")


# ---- run.json ----------------------------------------------------------------------------------


def change_run(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / "run.json").read_text())
        for name, value in changes.items():
            content.pop(name)
            if value is not ...:
                content[name] = value
        (folder / "run.json").write_text(json.dumps(content))

    return apply


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": ...}, "step is missing or malformed"),
        ({"step": "seven"}, "step is missing or malformed"),
        ({"step": -1}, "step is missing or malformed"),
        ({"step": True}, "step is missing or malformed"),
        ({"format": ...}, "has format None, this version reads format 1"),
        ({"format": 2}, "has format 2, this version reads format 1"),
        ({"scheduler": [], "extra": 1}, "scheduler, extra is missing or malformed"),
        ({"loader": {"epoch": 0}}, "loader is missing or malformed"),
        ({"loader": {"epoch": -1, "consumed_samples": 4}}, "loader is missing or malformed"),
        ({"loader": {"epoch": 0, "consumed_samples": 10**40}}, "loader is missing or malformed"),
        ({"step": 10**30}, "step is missing or malformed"),
        ({"scheduler": {"last_epoch": 10**30}}, "scheduler is missing or malformed"),
        ({"scheduler": {"last_epoch": "x"}}, "scheduler is missing or malformed"),
        ({"tied": {"model.a": 3}}, "tied is missing or malformed"),
        ({"tied": {"model.a": "model.nowhere"}}, "not what a run writes: KeyError"),
    ],
)
def test_a_forged_run_file_is_refused(changes: dict[str, Any], message: str, saved: Path) -> None:
    check_refused(forge(saved, change_run(**changes)), message)


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, "\xff"])
def test_a_run_file_that_is_not_an_object_is_refused(text: str, saved: Path) -> None:
    def change(folder: Path) -> None:
        (folder / "run.json").write_bytes(text.encode("latin-1"))

    check_refused(forge(saved, change), r"run\.json is missing or unreadable")


@pytest.mark.parametrize(
    "change",
    [
        change_run(scheduler={}),
        change_run(scaler={}),
        lambda folder: (folder / "random-00000.json").write_text("{}"),
        lambda folder: (folder / "random-00000.json").write_text('{"python": 3}'),
    ],
)
def test_a_state_that_cannot_be_restored_is_the_files_fault(
    change: Callable[[Path], None], saved: Path
) -> None:
    folder = forge(saved, change)
    with pytest.raises(CheckpointError, match=r"run\.json is not what a run writes: \w+Error"):
        load_checkpoint(folder, Run().state)


@pytest.mark.parametrize("name", ["iter_²", "iter_", "iter_-1", "iter_" + "9" * 60])
def test_folders_with_odd_names_are_not_checkpoints(name: str, saved: Path) -> None:
    (saved / name).mkdir()
    (saved / "latest_checkpointed_iteration.txt").write_text("9" * 5000)
    state = Run().state
    load_checkpoint(saved, state)
    assert state.step == 2


def test_a_checkpoint_without_its_place_in_the_data_says_so(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_checkpoint(forge(saved, change_run(loader=None)), Run().state)
    assert "was saved without a place in the data, which is read from its start" in caplog.text


# ---- the tensors -------------------------------------------------------------------------------


def test_the_tensors_of_another_step_are_refused(saved: Path) -> None:
    """Adam has counted one update, ``run.json`` two."""

    def exchange(folder: Path) -> None:
        shutil.rmtree(folder / "state")
        shutil.copytree(saved / "iter_0000001" / "state", folder / "state")

    check_refused(forge(saved, exchange), r"step is not 2\.0, as run\.json says")


def test_a_tensor_of_another_type_than_its_index_says_is_refused(saved: Path) -> None:
    folder = forge(saved, change_index(change_entry("dtype", "float16")))
    with pytest.raises(CheckpointError, match=r"holds torch\.float32, its index says"):
        load_checkpoint(folder, Run().state)


def test_an_index_of_many_parts_is_checked_once(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large run writes hundreds of thousands of parts, and checking them takes seconds."""
    calls = []
    check = tensors.check_index

    def count(*words: Any) -> None:
        calls.append(words)
        check(*words)

    monkeypatch.setattr(tensors, "check_index", count)
    load_checkpoint(saved / "iter_0000002", Run().state)
    assert len(calls) == 1


@given(
    shape=st.lists(st.integers(1, 4), min_size=0, max_size=3),
    corners=st.lists(st.tuples(*[st.integers(0, 4)] * 6), max_size=8),
)
def test_parts_cover_a_tensor_if_every_element_is_in_one(
    shape: list[int], corners: list[tuple[int, ...]]
) -> None:
    parts, covered = [], torch.zeros(shape, dtype=torch.bool)
    for corner in corners:
        start = [min(a, n) for a, n in zip(corner[:3], shape, strict=False)]
        size = [min(b, n - a) for a, b, n in zip(start, corner[3:], shape, strict=False)]
        parts.append(Part(tuple(start), tuple(size), "file", 0, 1 << 20))
        covered[tuple(slice(a, a + b) for a, b in zip(start, size, strict=True))] = True
    index = {"weight": Entry(torch.float32, tuple(shape), parts)}
    problems = [text for text in find_index_problems(index, Path("nowhere")) if "make up" in text]
    assert bool(problems) == (not covered.all())


def test_a_tensor_of_very_many_parts() -> None:
    parts = [Part((start, 0), (1, 2), "file", 0, 8) for start in range(100_000)]
    whole = {"weight": Entry(torch.float32, (100_000, 2), parts)}
    assert not [text for text in find_index_problems(whole, Path()) if "make up" in text]
    del parts[77_777]
    assert [text for text in find_index_problems(whole, Path()) if "make up" in text]
