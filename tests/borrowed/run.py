"""Run another library's own tests with ours in its place, and count what passes.

    python -m tests.borrowed.run transformers FOLDER [file.py ...] [--theirs]
    python -m tests.borrowed.run accelerate FOLDER ...
    python -m tests.borrowed.run document FOLDER [NAME ...]

FOLDER is the ``tests`` folder of that library's repository, checked out at the tag of the installed
version. ``document`` runs the scripts and commands that users know from documents, on 1, 2 and 4
processes; there, FOLDER is an empty one to work in, and NAME a part of the names to run.
"""

from __future__ import annotations

import importlib
import sys

LIBRARIES = ("transformers", "accelerate", "document")


def main() -> int:
    if len(sys.argv) < 3 or sys.argv[1] not in LIBRARIES:
        print(__doc__)
        return 2
    borrowed = importlib.import_module(f"tests.borrowed.{sys.argv[1]}_tests")
    return int(borrowed.main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
