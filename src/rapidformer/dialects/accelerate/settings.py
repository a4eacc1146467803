"""From the arguments of ``Accelerator(...)`` to the ``Settings`` of a run.

Neither the command line nor the environment of Accelerate is read: a script's flags are its own.
Flags of ``rapidformer launch`` apply if the constructor is not given the same setting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer.config import Settings, arguments_from_mapping
from rapidformer.config.deepspeed_file import find_value, load_deepspeed_file, spell_deepspeed
from rapidformer.config.tracker_names import is_installed
from rapidformer.dialects.accelerate.file import translate_deepspeed, translate_precision
from rapidformer.dialects.accelerate.names import ACCELERATOR
from rapidformer.dialects.calls import add_launch_flags, check_names
from rapidformer.errors import collecting, raise_problems
from rapidformer.training.trackers.build import OWN

_SOURCE = "Accelerator"
_OF_PLUGIN = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "zero_optimization", "gradient_clipping", "stage", "offload_optimizer", "offload_param",
    "stage3_gather_16bit_weights_on_model_save",
}  # fmt: skip


@dataclass
class DeepSpeedPlugin:
    """Accelerate's words for ZeRO: a stage, or a DeepSpeed file (its path or its content)."""

    hf_ds_config: str | Path | dict[str, Any] | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    zero_stage: int = 2
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None


@dataclass
class ProjectConfiguration:
    """Accelerate's words for the folders of a project and the checkpoints in them."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False


def find_folders(arguments: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Where a project and its logs are, in the arguments of ``Accelerator`` or their project."""
    project = arguments.get("project_config")
    folder = arguments.get("project_dir") or getattr(project, "project_dir", None)
    logs = arguments.get("logging_dir") or getattr(project, "logging_dir", None)
    return folder or None, logs or folder or None


def build_accelerator_settings(arguments: Mapping[str, Any]) -> Settings:
    """The settings of a run; every problem of the arguments is in the one ConfigurationError."""
    problems: list[str] = []
    check_names(_SOURCE, arguments, ACCELERATOR, problems)
    _check_trackers(arguments, problems)
    values: dict[str, Any] = {"clip_grad": 0.0, "save_total_limit": 1}  # Accelerate's own defaults
    values |= translate_precision(arguments.get("mixed_precision"), arguments.get("fp16"), problems)
    if arguments.get("cpu"):
        values["device"] = "cpu"
    if (seed := getattr(arguments.get("dataloader_config"), "data_seed", None)) is not None:
        values["data_seed"] = seed
    if arguments.get("dynamo_backend"):
        values |= {"compile": True, "compile_backend": str(arguments["dynamo_backend"]).lower()}
    if (plugin := arguments.get("fsdp_plugin")) is not None:
        values["zero_3_memory_optimization"] = True
        if getattr(plugin, "cpu_offload", None):
            values["cpu_offload"] = True
    if (plugin := arguments.get("deepspeed_plugin")) is not None:
        values |= translate_deepspeed(_read_plugin(plugin), "DeepSpeedPlugin", problems)
    values |= _choose_accumulation(arguments, values, problems)
    settings = Settings()
    with collecting(problems):
        file = load_deepspeed_file(values["deepspeed"]) if "deepspeed" in values else {}
        if find_value(file, "gradient_clipping") is not None:
            del values["clip_grad"]
        settings = arguments_from_mapping(values, source=_SOURCE)
    raise_problems(problems)
    return add_launch_flags(settings, values.keys() - {"clip_grad"})


def _read_plugin(plugin: Any) -> dict[str, Any]:
    """The values of a plugin that differ from its defaults; Accelerate's own class may be given."""
    ours = {field.name: field.default for field in dataclasses.fields(DeepSpeedPlugin)}
    values: dict[str, Any] = {name: getattr(plugin, name, ours[name]) for name in ours}
    content = values["hf_ds_config"]
    if hasattr(content, "config"):  # transformers' or Accelerate's HfDeepSpeedConfig
        content = {k: v for k, v in content.config.items() if v != float("inf")}
        zero = content.get("zero_optimization")
        # Accelerate writes there what the plugin's other arguments say.
        repeats = isinstance(zero, dict) and {*content, *zero} <= _OF_PLUGIN
        values["hf_ds_config"] = None if repeats else content
    changed = {name: value for name, value in values.items() if value != ours[name]}
    if isinstance(content := changed.get("hf_ds_config"), dict):
        changed["hf_ds_config"] = spell_deepspeed(content)
    return {"zero_stage": values["zero_stage"], **changed}


def _choose_accumulation(
    arguments: Mapping[str, Any], values: Mapping[str, Any], problems: list[str]
) -> dict[str, Any]:
    """One number, though three places may say it."""
    plugin = arguments.get("gradient_accumulation_plugin")
    name = "gradient_accumulation_steps"
    said = {
        f"Accelerator({name}=...)": arguments.get(name),
        "gradient_accumulation_plugin": getattr(plugin, "num_steps", None),
        "deepspeed_plugin": values.get(name),
    }
    if getattr(plugin, "sync_with_dataloader", True) is False:
        problems.append(
            "gradient_accumulation_plugin: sync_with_dataloader=False is not supported, because an "
            "epoch's last update ends with it: leave it out, or drop rows from the data until "
            "num_steps divides the batches of an epoch."
        )
    numbers: dict[str, int] = {}
    for where, number in said.items():
        if number is not None and (not str(number).isdecimal() or int(number) < 1):
            problems.append(f"{where} must be a whole number of at least 1, got {number!r}.")
        elif number not in (None, 1):
            numbers[where] = int(number)
    if len(set(numbers.values())) > 1:
        listed = ", ".join(f"{where} says {number}" for where, number in numbers.items())
        problems.append(f"gradient accumulation: {listed}.")
    if "deepspeed" in values and not numbers:
        return {}  # the DeepSpeed file says it
    return {name: next(iter(numbers.values()), 1)}


def splits_batches(arguments: Mapping[str, Any]) -> bool:
    """Whether a DataLoader's ``batch_size`` counts the rows of all processes."""
    config = arguments.get("dataloader_config")
    return bool(arguments.get("split_batches") or getattr(config, "split_batches", False))


def list_trackers(arguments: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    """What ``log_with`` asks for: names, and tracker objects of the user's own."""
    asked = arguments.get("log_with") or []
    wanted = asked if isinstance(asked, (list, tuple)) else [asked]
    objects = [one for one in wanted if hasattr(one, "log") and hasattr(one, "finish")]
    names = [str(getattr(one, "value", one)) for one in wanted if one not in objects]
    return [name if ":" in name else name.lower() for name in names], objects


def _check_trackers(arguments: Mapping[str, Any], problems: list[str]) -> None:
    names, _ = list_trackers(arguments)
    known = find_tracker_classes()
    here = ["tensorboard", *list_own_trackers(), *known]
    unknown = [name for name in names if name not in ("all", *here) and ":" not in name]
    if unknown:
        problems.append(
            f"Accelerator(log_with={', '.join(unknown)}): there is "
            f"{', '.join(here)} here. For wandb, mlflow and trackio run pip install "
            "'rapidformer[trackers]'. For another tracker, install its package and Accelerate, "
            "which brings the class that writes to it, or give a tracker object, or your own "
            "class as module:Class."
        )
    needs_folder = any(
        name in ("all", "tensorboard") or getattr(known.get(name), "requires_logging_directory", 0)
        for name in names
    )
    if needs_folder and find_folders(arguments)[1] is None:
        problems.append("Accelerator(log_with=...) needs a folder: give project_dir.")


def list_own_trackers() -> list[str]:
    """Those that need no Accelerate, as far as their packages are installed."""
    return [name for name in OWN if is_installed(name)]


def find_tracker_classes() -> dict[str, Any]:
    """Accelerate's own trackers by name, as far as their packages are installed, and those that
    the script has registered there."""
    try:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
        from accelerate.utils import LoggerType
    except ImportError:
        return {}
    available = {str(getattr(name, "value", name)) for name in get_available_trackers()}
    missing = {each.value for each in LoggerType} - available
    return {
        str(name).lower(): tracker
        for name, tracker in LOGGER_TYPE_TO_CLASS.items()
        if str(name) not in (*missing, "tensorboard", *OWN)
    }
