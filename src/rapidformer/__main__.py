"""``python -m rapidformer`` is ``rapidformer``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from rapidformer.cli.main import run_and_leave
    except KeyboardInterrupt:  # before the command could say what to do about it
        sys.exit(130)
    run_and_leave()
