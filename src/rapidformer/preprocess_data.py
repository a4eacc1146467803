"""``python -m rapidformer.preprocess_data ...`` is ``rapidformer preprocess ...``."""

from __future__ import annotations

import sys

from rapidformer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
