"""The tokenizer named by a run's settings, in Megatron's form: what ``get_tokenizer()`` returns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rapidformer.config import Settings
from rapidformer.errors import ConfigurationError

if TYPE_CHECKING:
    from rapidformer.data.tokenizers import Tokenizer


def load_tokenizer(args: Settings) -> Tokenizer:
    """By ``--tokenizer-type`` and its files, by ``--tokenizer-name-or-path``, or the model's."""
    from rapidformer.data.tokenizers import build_tokenizer

    folder = args.tokenizer_name_or_path
    if folder is None and args.tokenizer_type in (None, "HuggingFaceTokenizer"):
        folder = _get_model_folder(args)
        if folder is None:
            raise ConfigurationError(
                "there is no tokenizer: give --tokenizer-type and --vocab-file (and --merge-file), "
                "--tokenizer-name-or-path, or a model folder that has one."
            )
    return build_tokenizer(
        tokenizer_type=args.tokenizer_type,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        tokenizer_model=args.tokenizer_model,
        tokenizer_name_or_path=folder,
        vocab_size=args.vocab_size,
        vocab_extra_ids=args.vocab_extra_ids,
    )


def _get_model_folder(args: Settings) -> str | None:
    """A model folder in ``--load`` takes precedence, as it does for the model itself."""
    if args.load is not None and (Path(args.load).expanduser() / "config.json").is_file():
        return args.load
    return args.pretrained_model_name_or_path
