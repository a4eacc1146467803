"""``accelerate config``: what it asks, and the file that it writes and plugins as our settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rapidformer.dialects.accelerate.names import ACCELERATE_FILE, DEEPSPEED_PLUGIN
from rapidformer.foreign_names import Table, copy_mapped

Values = dict[str, Any]
_PRECISIONS = ("fp16", "bf16")
_IN_PLUGIN = {"deepspeed_config_file": "hf_ds_config"}


def translate_file(content: Mapping[str, Any], path: str, problems: list[str]) -> Mapping[str, Any]:
    """The settings that the file means; one whose keys are not Accelerate's is left as it is."""
    if "compute_environment" not in content and "distributed_type" not in content:
        return content
    entries = {name: value for name, value in content.items() if value not in (None, {}, "")}
    _check(entries, ACCELERATE_FILE, path, problems)
    values = copy_mapped(entries, ACCELERATE_FILE)
    values |= translate_precision(entries.get("mixed_precision"), entries.get("fp16"), problems)
    values |= _translate_place(entries, path, problems)
    deepspeed = entries.get("deepspeed_config")
    if isinstance(deepspeed, Mapping):
        # The file calls a DeepSpeed file by another name than the plugin does.
        plugin: Values = {_IN_PLUGIN.get(name) or name: value for name, value in deepspeed.items()}
        values |= translate_deepspeed(plugin, f"deepspeed_config in {path}", problems)
    if entries.get("distributed_type") == "FSDP" or "fsdp_config" in entries:
        values |= _translate_fsdp(entries.get("fsdp_config") or {})
    return values


def translate_precision(mixed: Any, fp16: Any, problems: list[str]) -> Values:
    """``mixed_precision`` and its older spelling, ``fp16``."""
    word = str(getattr(mixed, "value", mixed)).lower() if mixed is not None else None
    if word not in (None, "no", "false", *_PRECISIONS):  # YAML reads a bare `no` as false
        problems.append(f'mixed_precision must be "no", "fp16" or "bf16", got {mixed!r}.')
    if fp16 and word not in (None, "fp16"):
        problems.append(f"fp16=True and mixed_precision={mixed!r} say different things.")
    kind = "fp16" if fp16 else word
    return {"mixed_precision": kind} if kind in _PRECISIONS else {}


def translate_deepspeed(entries: Mapping[str, Any], where: str, problems: list[str]) -> Values:
    """The arguments of a ``DeepSpeedPlugin``."""
    _check(entries, DEEPSPEED_PLUGIN, where, problems)
    if entries.get("hf_ds_config"):
        return {"deepspeed": str(entries["hf_ds_config"])}
    copied = copy_mapped(entries, DEEPSPEED_PLUGIN)
    values = {name: value for name, value in copied.items() if value not in (None, "auto")}
    stage = int(entries.get("zero_stage") or 0)
    if stage not in range(4):
        problems.append(f"{where}: zero_stage must be 0 to 3, got {stage}.")
    elif stage:
        values[f"zero_{stage}_memory_optimization"] = True
    for name in ("offload_optimizer_device", "offload_param_device"):
        device = str(entries.get(name) or "none")
        if device not in ("cpu", "none"):
            problems.append(f"{where}: {name} must be cpu or none, got {device}.")
        elif device == "cpu":
            values["cpu_offload"] = True
    return values


def _translate_place(entries: Mapping[str, Any], path: str, problems: list[str]) -> Values:
    kind = str(entries.get("distributed_type", "NO")).upper()
    environment = entries.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        problems.append(f"{path}: compute_environment must be LOCAL_MACHINE, got {environment}.")
    if kind in ("TPU", "XLA", "MEGATRON_LM"):
        problems.append(f"{path}: distributed_type {kind} is not supported.")
    machines, processes = int(entries.get("num_machines", 1)), int(entries.get("num_processes", 1))
    if machines < 1 or processes % machines:
        problems.append(
            f"{path}: num_processes {processes} is not a multiple of num_machines {machines}."
        )
        return {}
    values: Values = {"nproc_per_node": processes // machines}
    if kind == "MULTI_CPU" or entries.get("use_cpu"):
        values["device"] = "cpu"
    if machines == 1:
        values |= {"nnodes": 1, "node_rank": 0}
    return values


def _translate_fsdp(config: Mapping[str, Any]) -> Values:
    strategy = str(config.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    reshards = str(config.get("fsdp_reshard_after_forward", "true")).lower()
    is_stage_2 = strategy in ("SHARD_GRAD_OP", "2") or reshards in ("false", "shard_grad_op")
    values: Values = {f"zero_{2 if is_stage_2 else 3}_memory_optimization": True}
    if config.get("fsdp_offload_params"):
        values["cpu_offload"] = True
    return values


def _check(entries: Mapping[str, Any], table: Table, where: str, problems: list[str]) -> None:
    for name in entries:
        row = table.get(name)
        if row is None:
            problems.append(f"{where}: {name} is not supported.")
        elif row.outcome == "refused" and entries[name]:
            problems.append(f"{where}: {name} is not supported: {row.note}.")


Ask = Callable[[str, str, str, Callable[[str], str]], str]
"""name, question, default, check -> answer"""

START = "0"
"""The first answer, "This machine", to our first question starts this dialogue."""
_MACHINES = ("no distributed training", "multi-CPU", "multi-GPU")


def ask_as_accelerate(ask: Ask) -> dict[str, Any]:
    """The settings that the answers after the first mean."""
    listed = ", ".join(f"[{number}] {name}" for number, name in enumerate(_MACHINES))
    kind = ask("machine", f"Which type of machine are you using? ({listed})", "0", _check_machine)
    machines = int(ask("machines", "How many different machines will you use?", "1", check_number))
    values: dict[str, Any] = {}
    if _ask_yes(ask, "Do you want to use DeepSpeed? [yes/NO]"):
        values["zero_2_memory_optimization"] = True
    total = int(ask("total", "How many processes in total will you use?", "1", check_number))
    if _ask_yes(ask, "Do you wish to use FP16 (mixed precision)? [yes/NO]"):
        values["mixed_precision"] = "fp16"
    if kind != "0":
        values["device"] = "cpu" if kind == "1" else "cuda"
    if machines > 1:
        values["nnodes"] = machines
    return {**values, "nproc_per_node": max(total // machines, 1)}


def _ask_yes(ask: Ask, question: str) -> bool:
    return ask("yes_or_no", question, "no", _check_yes)[0].lower() == "y"


def check(words: str, is_right: Callable[[str], bool], answer: str) -> str:
    """The answer, if it is right; ``words`` say what is."""
    if not is_right(answer):
        raise ValueError(f"must be {words}, not {answer!r}.")
    return answer


_check_machine = partial(check, "0, 1 or 2", lambda answer: answer in ("0", "1", "2"))
check_number = partial(
    check, "a whole number of at least 1", lambda answer: answer.isdecimal() and int(answer) > 0
)
_check_yes = partial(check, "yes or no", lambda answer: answer.lower() in ("y", "yes", "n", "no"))
