"""``--load RUN`` in evaluate and predict: the run's best model, its task, how it read its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rapidformer.config import Settings, get_settings
from rapidformer.errors import ModelError
from rapidformer.models.location import is_model_folder

_ARGUMENTS_FILE = "arguments.yaml"
# How the model's training data was read: evaluation and prediction must read theirs the same way.
_READING = (
    "task", "data_name", "seq_length", "decoder_seq_length", "text_column", "text_pair_column",
    "label_column", "target_column", "question_column", "context_column", "answers_column",
    "choice_columns", "image_column", "messages_column", "prompt_column", "response_column",
    "system_column", "source_prefix", "problem_type", "label_all_tokens", "doc_stride",
    "group_texts", "train_on_prompts",
)  # fmt: skip
_DATA = ("data_path", "data_dir", "train_data", "valid_data", "test_data")
# Which rows were held out, which samples pre-training took: only with the run's own data.
_SPLITTING = ("validation_split", "seed")
_PRETRAINING = (
    "train_data_path", "valid_data_path", "test_data_path", "split", "tokenizer_type", "vocab_file",
    "merge_file", "tokenizer_model", "tokenizer_name_or_path", "vocab_size", "vocab_extra_ids",
    "train_iters", "train_samples", "train_tokens", "eval_iters", "eval_interval",
    "micro_batch_size", "global_batch_size", "mask_prob", "short_seq_prob", "reset_position_ids",
    "reset_attention_mask", "eod_mask_loss", "data_cache_path",
)  # fmt: skip


def choose_run_model(args: Settings, command: str) -> Settings:
    """The settings with a model folder in ``load`` and the settings of its run, if given."""
    if not args.is_given("load") or args.load is None:
        return args
    folder = Path(args.load).expanduser()
    args = _inherit(args, folder, command)
    if not folder.is_dir() or is_model_folder(folder):
        return args
    for name in ("best", "last"):
        if is_model_folder(folder / name):
            return args.replace(f"the {name} model of {folder}", load=str(folder / name))
    raise ModelError(
        f"--load {args.load} has no model (no config.json, best or last): give the folder of a "
        "finished run, or one of its models."
    )


def _inherit(args: Settings, folder: Path, command: str) -> Settings:
    """The settings of the run that the user does not give again."""
    file = next((p for p in _get_places(folder) if p.is_file()), None)
    if file is None:
        return args
    stored = _read(file)
    has_data = any(getattr(args, name) is not None for name in (*_DATA, "train_data_path"))
    names = list(_READING)
    if command == "evaluate" and not has_data:
        names += [*_DATA, *_SPLITTING]
        names += _PRETRAINING if stored.get("task") == "pretraining" else ()
    settings = get_settings()
    values = {
        name: settings[name].convert(stored[name])
        for name in names
        if stored.get(name) is not None and name in settings and not args.is_given(name)
    }
    return args.replace(f"the run of {file.parent}", **values)


def _get_places(folder: Path) -> tuple[Path, ...]:
    """``--load`` may name the run's folder, or one of its models and checkpoints."""
    return folder / _ARGUMENTS_FILE, folder.parent / _ARGUMENTS_FILE


def _read(file: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
