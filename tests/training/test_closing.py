"""How a run ends: what it says was kept, and what a finished run says when it is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rapidformer.checkpoint.finding import find_checkpoint
from rapidformer.errors import RapidformerError
from rapidformer.log import configure_logging
from tests.training.test_templates import LineFinetuner, Regression, make_engine, read_lines


def test_a_run_says_what_it_kept_and_which_metric_best_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = LineFinetuner(make_engine(epochs=2, save=str(tmp_path)))
    configure_logging("info")
    value = trainer.train()["error"]
    said = capsys.readouterr().err
    assert f"best      error {value:.4f} at step 20: {tmp_path / 'best'}" in said
    assert f"last      step 20 of 20: {tmp_path / 'last'}" in said
    weights = tmp_path / "best" / "model.safetensors"
    assert f'next      model.load_state_dict(safetensors.torch.load_file("{weights}"))' in said
    Regression().load_state_dict(load_file(weights))


def test_a_run_that_ends_early_says_how_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = LineFinetuner(make_engine(epochs=2, save=str(tmp_path), exit_interval=5))
    configure_logging("info")
    trainer.train()
    said = capsys.readouterr().err
    assert "last      step 5 of 20" in said
    assert f"resume    run the same command with --load {tmp_path}" in said


def test_resuming_a_finished_run_says_that_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = LineFinetuner(make_engine(epochs=1, save=str(tmp_path))).train()
    lines, model = read_lines(tmp_path), (tmp_path / "last").stat().st_mtime_ns
    again = LineFinetuner(make_engine(epochs=1, save=str(tmp_path), load=str(tmp_path)))
    configure_logging("info")
    assert again.train() == first
    said = capsys.readouterr().err
    assert f"nothing left to do: {tmp_path} is at step 10, and this run ends at step 10." in said
    assert "increase --epochs or --train-iters" in said
    assert read_lines(tmp_path) == lines
    assert (tmp_path / "last").stat().st_mtime_ns == model


def test_a_hooks_metric_that_does_not_exist_is_named_and_no_step_is_lost(tmp_path: Path) -> None:
    engine = make_engine(epochs=2, save=str(tmp_path), metric_for_best_model="acuracy")
    with pytest.raises(
        RapidformerError, match=r"acuracy: the evaluation returns only error, examples"
    ):
        LineFinetuner(engine).train()
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000010"
