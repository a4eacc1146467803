"""The speech example, command by command in this process."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from rapidformer.checkpoint.exporting import plain_process, proof

EXAMPLE = Path(__file__).parents[2] / "examples" / "speech" / "run.py"


def test_song_is_learnt_and_written_down(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main: Any = runpy.run_path(str(EXAMPLE))["main"]
    shown = []

    def run(*words: str) -> None:
        done = command(*words)
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout)

    main.__globals__["run"] = run
    main(["--output", str(tmp_path), "--steps", "8", "--recordings", "24"])
    assert "8,000 Hz, resampled to 16,000 Hz" in shown[0]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [line["eval_loss"] for line in lines if "eval_wer" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert json.loads(shown[-1].strip().splitlines()[-1])["audio"].endswith("0000.wav")

    def compute(folder: Path, rows: plain_process.Rows) -> Any:
        return plain_process.compute_outputs(plain_process.load_model(folder), rows)

    monkeypatch.setattr(proof, "_compute_plainly", compute)
    run("export", str(tmp_path / "run"), str(tmp_path / "exported"))
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(tmp_path / "exported")
    assert processor.tokenizer.convert_tokens_to_ids("|") == 0
