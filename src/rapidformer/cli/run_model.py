"""``--load`` in evaluate and predict: a run's best model, its task, how it read its data.

It may also name a model folder, an adapter, a checkpoint, or a model on the Hub. In training
without ``--task``, it names a run to go on with; its settings hold unless they are given again.
"""

from __future__ import annotations

from pathlib import Path

from rapidformer.checkpoint.finding import ARGUMENTS_FILE, RUN, read_arguments
from rapidformer.checkpoint.publish import read_json
from rapidformer.config import Settings, get_settings
from rapidformer.errors import ModelError
from rapidformer.hub import is_missing_folder
from rapidformer.models.location import (
    DESCRIPTION,
    find_model_folder,
    get_model_location,
    is_model_folder,
)

# How the model's training data was read: evaluation and prediction must read theirs the same way.
_READING = (
    "task", "data_name", "seq_length", "decoder_seq_length", "text_column", "text_pair_column",
    "label_column", "target_column", "question_column", "context_column", "answers_column",
    "choice_columns", "image_column", "messages_column", "prompt_column", "response_column",
    "system_column", "tools_column", "chat_template_kwargs", "source_prefix", "problem_type",
    "label_all_tokens", "doc_stride", "group_texts", "train_on_prompts", "chosen_column",
    "rejected_column", "margin_column", "negative_columns", "loss", "audio_column",
    "max_audio_seconds", "language", "speech_task", "normalize_text", "ctc_loss_reduction",
)  # fmt: skip
# The end of a class name in config.json -> the task of such models.
_ARCHITECTURES = {
    "ForCausalLM": "causal_lm", "LMHeadModel": "causal_lm", "GPTModel": "causal_lm",
    "ForMaskedLM": "masked_lm", "ForCTC": "speech_recognition",
    "WhisperForConditionalGeneration": "speech_recognition",
    "ForConditionalGeneration": "seq2seq_lm",
    "Wav2Vec2ForSequenceClassification": "audio_classification",
    "HubertForSequenceClassification": "audio_classification",
    "WavLMForSequenceClassification": "audio_classification",
    "ForAudioClassification": "audio_classification",
    "ForSequenceClassification": "sequence_classification",
    "ForTokenClassification": "token_classification",
    "ForQuestionAnswering": "question_answering", "ForMultipleChoice": "multiple_choice",
    "ForImageClassification": "image_classification",
}  # fmt: skip
_ADAPTER_TASKS = {
    "CAUSAL_LM": "causal_lm", "SEQ_2_SEQ_LM": "seq2seq_lm", "SEQ_CLS": "sequence_classification",
    "TOKEN_CLS": "token_classification", "QUESTION_ANS": "question_answering",
}  # fmt: skip
# What a task's loss is made of besides the model: evaluation computes it again.
_OBJECTIVES = {
    "distillation": (
        "teacher", "divergence", "distillation_beta", "distillation_temperature",
        "distillation_alpha", "teacher_precision",
    ),
    "preference": (
        "pretrained_model_name_or_path", "reference_precision", "beta", "simpo_gamma",
        "length_normalized", "sft_weight", "desirable_weight", "undesirable_weight",
        "label_smoothing",
    ),
    "reward": ("center_rewards_coefficient",),
    "grpo": ("reward_function", "reward_weights", "max_new_tokens"),
    "embedding": (
        "similarity_scale", "symmetric", "mask_duplicates", "triplet_margin", "matryoshka_dims",
    ),
}  # fmt: skip
_ANSWERING = ("causal_lm", "distillation", "preference", "grpo")
_DATA = ("data_path", "data_dir", "train_data", "valid_data", "test_data", "data_weights")
# Which rows were held out, which samples pre-training took: only with the run's own data.
_SPLITTING = ("validation_split", "seed")
_PRETRAINING = (
    "train_data_path", "valid_data_path", "test_data_path", "split", "tokenizer_type", "vocab_file",
    "merge_file", "tokenizer_model", "tokenizer_name_or_path", "vocab_size", "vocab_extra_ids",
    "train_iters", "train_samples", "train_tokens", "eval_iters", "eval_interval",
    "micro_batch_size", "global_batch_size", "mask_prob", "short_seq_prob", "reset_position_ids",
    "reset_attention_mask", "eod_mask_loss", "data_cache_path",
)  # fmt: skip


# What the user says about the length of a run replaces all that the run was told about it.
_LENGTHS = ("epochs", "train_iters", "train_samples", "train_tokens")


def choose_run_model(args: Settings, command: str) -> Settings:
    """The settings with a model folder in ``load``, the settings of its run and its task."""
    if command == "train":
        has_work = args.task is not None or args.user_script is not None or args.load is None
        return args if has_work else _inherit(args, Path(args.load or "").expanduser(), command)
    if args.is_given("load") and args.load is not None:
        args = _choose_model(args, Path(args.load).expanduser(), command)
    if args.task is None and command in ("evaluate", "predict"):
        task = guess_task(get_model_location(args))
        args = args.replace("the model's architecture", task=task) if task else args
    return args


def _choose_model(args: Settings, folder: Path, command: str) -> Settings:
    args, model = _inherit(args, folder, command), find_model_folder(folder)
    if model == folder:
        return args
    if not folder.is_dir():
        if is_missing_folder(str(args.load)):  # reported with the other problems
            return args
        return args.replace("--load", pretrained_model_name_or_path=args.load, load=None)
    if model is not None:
        return args.replace(f"the {model.name} model of {folder}", load=str(model))
    checkpoint = _find_checkpoint(folder)
    if checkpoint is None:
        raise ModelError(
            f"--load {args.load} has no model (no config.json, best, last or iter_… folder): give "
            "the folder of a run, or one of its models or checkpoints."
        )
    _check_has_description(checkpoint)
    return args.replace(f"the checkpoint {checkpoint}", load=str(checkpoint / DESCRIPTION))


def _find_checkpoint(folder: Path) -> Path | None:
    """The folder itself, or the newest checkpoint in it; a prediction needs no training state."""
    if (folder / RUN).is_file():
        return folder
    checkpoints = [path for path in folder.glob("iter_*") if (path / RUN).is_file()]
    return max(checkpoints, key=lambda path: path.name, default=None)


def _check_has_description(checkpoint: Path) -> None:
    """Refuse a checkpoint from which the model cannot be built."""
    if "base" in read_json(checkpoint / RUN):
        problem = "it holds an adapter's state without the model under it; give best or last"
    elif not (checkpoint / DESCRIPTION / "config.json").is_file():
        problem = (
            "it does not describe its model, as checkpoints of a task's run do. Use the script "
            "that trained it"
        )
    else:
        return
    raise ModelError(f"--load {checkpoint} is a checkpoint to resume training from: {problem}.")


def guess_task(location: str | None) -> str | None:
    """The task that a local model was trained for, by the class it names; None if unknown."""
    if not location:
        return None
    config = read_json(Path(location) / "config.json", or_nothing=True)
    if (Path(location) / "modules.json").is_file():  # sentence-transformers' models have these
        return "embedding"
    if "sentence_transformers" in config:
        return "reranking"
    if adapter := read_json(Path(location) / "adapter_config.json", or_nothing=True):
        return _ADAPTER_TASKS.get(str(adapter.get("task_type")))
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    return next((task for end, task in _ARCHITECTURES.items() if name.endswith(end)), None)


def _inherit(args: Settings, folder: Path, command: str) -> Settings:
    """The settings of the run that the user does not give again."""
    # `--load` may name the run's folder, or one of its models and checkpoints.
    places = (place for place in (folder, folder.parent) if (place / ARGUMENTS_FILE).is_file())
    run = next(places, None)
    if run is None:
        return args
    stored = read_arguments(run)
    start = Path(str(stored.get("load") or "")).expanduser()
    if is_model_folder(start):
        stored["pretrained_model_name_or_path"] = str(start)  # what the run itself began with
    elif command == "evaluate" and stored.get("finetune") and start.is_dir():
        stored["pretrained_model_name_or_path"] = None  # it began with a checkpoint
    has_data = any(getattr(args, name) is not None for name in (*_DATA, "train_data_path"))
    names = list(_READING)
    if command == "train":
        is_length_given = any(map(args.is_given, _LENGTHS))
        left_out = {"load", "save", "config", *(_LENGTHS if is_length_given else ())}
        names = [name for name in stored if name not in left_out]
        if stored.get("task") is None or stored.get("user_script") is not None:
            return args
    if command == "predict" and not has_data:
        names.remove("data_name")  # on its own, it would name a data set to predict on
    if command == "predict" and stored.get("task") in _ANSWERING:
        names.remove("seq_length")  # answers and conversations may fill the model's whole context
    if command == "evaluate":
        names += _OBJECTIVES.get(str(stored.get("task")), ())
    if command == "evaluate" and not has_data:
        names += [*_DATA, *_SPLITTING]
        names += _PRETRAINING if stored.get("task") == "pretraining" else ()
    settings, values = get_settings(), {}
    for name in names:
        if stored.get(name) is not None and name in settings and not args.is_given(name):
            try:
                values[name] = settings[name].convert(stored[name])
            except ValueError as reason:
                raise ModelError(f"{run / ARGUMENTS_FILE}: {name} {reason}.") from None
    return args.replace(f"the run of {run}", **values)
