"""Run another library's own tests with ours in its place, and count what passes.

    python -m tests.borrowed.run transformers FOLDER [file.py ...] [--theirs]
    python -m tests.borrowed.run accelerate FOLDER ...

FOLDER is the ``tests`` folder of that library's repository, checked out at the tag of the installed
version.
"""

from __future__ import annotations

import importlib
import sys

LIBRARIES = ("transformers", "accelerate")


def main() -> int:
    if len(sys.argv) < 3 or sys.argv[1] not in LIBRARIES:
        print(__doc__)
        return 2
    borrowed = importlib.import_module(f"tests.borrowed.{sys.argv[1]}_tests")
    return int(borrowed.main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
