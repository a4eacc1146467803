"""``python -m rapidformer`` is ``rapidformer``."""

from __future__ import annotations

from rapidformer.cli.main import run_and_leave

if __name__ == "__main__":
    run_and_leave()
