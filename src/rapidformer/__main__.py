"""``python -m rapidformer`` is ``rapidformer``: both begin here."""

from __future__ import annotations

import sys


def start() -> int:
    """Run the command; Ctrl-C before it can say what to do about it shows no traceback."""
    try:
        from rapidformer.cli.main import main
    except KeyboardInterrupt:
        return 130
    return main()


if __name__ == "__main__":
    try:
        from rapidformer.cli.main import run_and_leave
    except KeyboardInterrupt:
        sys.exit(130)
    run_and_leave()
