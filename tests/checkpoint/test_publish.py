"""A folder appears whole or not at all, wherever the process dies."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rapidformer.checkpoint import publish as module
from rapidformer.checkpoint.loading import load_checkpoint
from rapidformer.checkpoint.publish import (
    MANIFEST,
    check_manifest,
    publish,
    remove_leftovers,
    replace_text,
    start_staging,
    withdraw,
)
from rapidformer.errors import CheckpointError

from .run import Run, save_checkpoint


class Crash(BaseException):
    """The process is gone: not an error that anybody could catch."""


def write_version(target: Path, text: str) -> None:
    staging = start_staging(target)
    (staging / "sub").mkdir()
    (staging / "sub" / "file").write_text(text)


def read_version(target: Path) -> str:
    check_manifest(target)
    return (target / "sub" / "file").read_text()


def test_new_folder_appears_with_its_manifest(tmp_path: Path) -> None:
    target = tmp_path / "a"
    write_version(target, "one")
    assert not target.exists()
    publish(target)
    assert read_version(target) == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_manifest_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """Its content is right now, but belongs to something outside of the folder."""
    write_version(tmp_path / "run", "one")
    publish(tmp_path / "run")
    (tmp_path / "run" / MANIFEST).rename(tmp_path / MANIFEST)
    (tmp_path / "run" / MANIFEST).symlink_to(tmp_path / MANIFEST)
    with pytest.raises(CheckpointError, match=r"run is damaged: its manifest.json is a link\.$"):
        read_version(tmp_path / "run")


def test_older_folder_makes_way(tmp_path: Path) -> None:
    target = tmp_path / "a"
    for text in ("one", "two"):
        write_version(target, text)
        publish(target)
    assert read_version(target) == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_leftovers_of_a_crash_do_not_mix_with_the_next(tmp_path: Path) -> None:
    target = tmp_path / "a"
    write_version(target, "half")
    (module.get_staging(target) / "stray").write_text("old")
    write_version(target, "whole")
    publish(target)
    assert not (target / "stray").exists()
    assert read_version(target) == "whole"


def die_at(patch: pytest.MonkeyPatch, call: int, folder: Path) -> None:
    """From this change of a name in the folder on, all fail: the dead cannot clean up either."""
    calls = {"count": 0}
    originals = {"rename": os.rename, "replace": os.replace}

    def make(name: str) -> Any:
        def change(source: Any, destination: Any, **options: Any) -> None:
            calls["count"] += Path(destination).parent == folder
            if calls["count"] >= call:
                raise Crash
            originals[name](source, destination, **options)

        return change

    for name in originals:
        patch.setattr(os, name, make(name))


@pytest.mark.parametrize("call", [1, 2, 3])
def test_crash_while_replacing_leaves_the_old_or_the_new(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """'A crash at any moment leaves the old folder or the new one' - under its own name."""
    target = tmp_path / "best"
    write_version(target, "old")
    publish(target)
    write_version(target, "new")
    with monkeypatch.context() as patch:
        die_at(patch, call, tmp_path)
        with suppress(Crash):
            publish(target)
    assert target.is_dir()
    assert read_version(target) in ("old", "new")


def test_crash_before_the_rename_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.train(1)
    save_checkpoint(tmp_path, run.state, {"step": 1})
    run.train(1)
    with monkeypatch.context() as patch:
        die_at(patch, 1, tmp_path)
        with pytest.raises(Crash):
            save_checkpoint(tmp_path, run.state, {"step": 2})
    assert load_checkpoint(tmp_path, Run().state) == {"step": 1}
    save_checkpoint(tmp_path, run.state, {"step": 2})
    assert load_checkpoint(tmp_path, Run().state) == {"step": 2}


def test_crash_between_checkpoint_and_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.train(1)
    save_checkpoint(tmp_path, run.state, {"step": 1})
    run.train(1)
    with monkeypatch.context() as patch:
        die_at(patch, 2, tmp_path)  # the first names the checkpoint, the second the tracker
        with pytest.raises(Crash):
            save_checkpoint(tmp_path, run.state, {"step": 2})
    assert load_checkpoint(tmp_path, Run().state)["step"] in (1, 2)


def test_crash_while_tensors_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rapidformer.checkpoint import saving

    run = Run()
    run.train(1)
    save_checkpoint(tmp_path, run.state, {"step": 1})
    run.train(1)

    def die(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(saving, "get_random_states", die)
        with pytest.raises(Crash):
            save_checkpoint(tmp_path, run.state, {"step": 2})
    assert load_checkpoint(tmp_path, Run().state) == {"step": 1}


def test_small_file_is_replaced_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    replace_text(path, "one")
    with monkeypatch.context() as patch:
        die_at(patch, 1, tmp_path)
        with pytest.raises(Crash):
            replace_text(path, "two")
    assert path.read_text() == "one"
    replace_text(path, "three")
    assert path.read_text() == "three"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_whose_deletion_is_cut_short_is_not_there_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill while an old checkpoint was deleted left half of it, which looked damaged."""
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    (folder / "file").touch()
    monkeypatch.setattr("shutil.rmtree", lambda path, **options: None)
    withdraw(folder)
    assert [path.name for path in tmp_path.iterdir()] == [".rapidformer-staging-iter_0000001"]
    monkeypatch.undo()
    remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())
