"""Rank logs hold lines, not the many drawings of a progress bar."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapidformer.launch.logs import _LineLog


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_of_a_line_drawn_again_the_last_form_is_kept(size: int, tmp_path: Path) -> None:
    data = (
        b"plain\n\x1b[32mgreen\x1b[0m\r\n"
        b"bar 1 \r\x1b[2Kbar 2 \r\x1b[2Ka message\n"
        b"\r 10%|#\r 20%|##\r100%|#####\n\nhalf"
    )
    log = _LineLog(tmp_path / "log")
    for start in range(0, len(data), size):
        log.write(data[start : start + size])
    log.close()
    expected = ["plain", "green", "a message", "100%|#####", "", "half"]
    assert (tmp_path / "log").read_text().splitlines() == expected
