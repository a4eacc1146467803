"""AdamW with moments in 8 bits: what it needs, and a state that resumes bit for bit."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rapidformer.checkpoint.loading import load_checkpoint
from rapidformer.cli.main import main
from rapidformer.config import parse_arguments, resolve
from rapidformer.errors import CheckpointError, ConfigurationError
from tests.checkpoint.run import Model, Run, save_checkpoint

WIDTH = 2048
"""Wide enough that the moments of the first weight are quantized."""


def test_a_missing_package_and_split_moments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapidformer.config.layout_rules.find_spec", lambda name: None)
    flags = ["--zero-1-memory-optimization", "--tensor-model-parallel-size", "2"]
    with pytest.raises(ConfigurationError) as caught:
        resolve(parse_arguments(["--optimizer-state-dtype", "int8", *flags]), world_size=4)
    for sentence in (
        "--optimizer-state-dtype int8 needs the package torchao: pip install "
        "'rapidformer[torchao]'.",
        "--optimizer-state-dtype int8 cannot be combined with --zero-1-memory-optimization: "
        "moments are quantized in blocks",
        "--optimizer-state-dtype int8 cannot be combined with --tensor-model-parallel-size",
    ):
        assert sentence in str(caught.value)


class TestWithTorchao:
    """CI does not install torchao; last run by hand with torchao 0.18.0 and torch 2.13."""

    @pytest.fixture(autouse=True)
    def _compile_nothing(self) -> Iterator[None]:
        if importlib.util.find_spec("torchao") is None:
            pytest.skip("needs torchao")
        with torch.compiler.set_stance("force_eager"):
            yield

    def test_it_follows_fp32_in_a_quarter_of_the_memory(self) -> None:
        small, plain = (Run(kind=kind, model=_build_model()) for kind in ("int8", "adam"))
        torch.manual_seed(1)
        losses = small.train(8)
        torch.manual_seed(1)
        assert losses == pytest.approx(plain.train(8), rel=0.02)
        state = small.optimizer.state[small.model.first.weight]
        assert state["exp_avg"].codes.dtype == state["exp_avg_sq"].codes.dtype == torch.uint8
        assert isinstance(small.optimizer.param_groups[0]["lr"], float)

    def test_a_resumed_run_is_bit_equal(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = Run(kind="int8", model=_build_model())
        run.train(3)
        folder = save_checkpoint(tmp_path, run.state, {})
        expected = run.train(3)
        resumed = Run(kind="int8", model=_build_model(), seed=99)
        load_checkpoint(tmp_path, resumed.state)
        assert resumed.train(3) == expected
        for name, value in run.weights().items():
            assert torch.equal(resumed.weights()[name], value), name
        assert main(["check", str(folder)]) == 0, capsys.readouterr().out

    @pytest.mark.parametrize(
        ("before", "after", "said"),
        [("int8", "adam", "with 8-bit moments"), ("bf16", "int8", "without 8-bit moments")],
    )
    def test_another_precision_is_refused(
        self, before: str, after: str, said: str, tmp_path: Path
    ) -> None:
        run = Run(kind=before, model=_build_model())
        run.train(1)
        save_checkpoint(tmp_path, run.state, {})
        resumed = Run(kind=after, model=_build_model())
        with pytest.raises(CheckpointError, match=rf"saved {said}.*pass --no-load-optim"):
            load_checkpoint(tmp_path, resumed.state)
        load_checkpoint(tmp_path, resumed.state, with_optimizer=False)


def _build_model() -> Model:
    torch.manual_seed(0)
    return Model(WIDTH)
