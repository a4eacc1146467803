"""``python preprocess_data.py ...`` is ``rapidformer preprocess ...``: Megatron's name for it."""

import sys

from rapidformer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
