"""peft's configuration of the adapters, and of layers trained whole, for a model."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.config.sections import AdapterArguments
from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.log import warn_once
from rapidformer.nearest import suggest
from rapidformer.strict_json import parse_json

if TYPE_CHECKING:
    from torch import nn

_ALL_LINEAR = "all-linear"
# Heads that peft trains and saves whole, by task.
_HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
_PATTERN_CHARACTERS = frozenset(".*+?[](){}|^$\\")


def build_config(args: AdapterArguments) -> Any | None:
    """peft's configuration of the adapters that the settings ask for; None without any."""
    if args.peft_config is not None:
        return _read_config(args.peft_config)
    if args.lora_rank is None:
        return None
    from peft import LoraConfig

    alpha = args.lora_alpha or 2 * args.lora_rank
    targets: str | list[str] | None = args.lora_target_modules
    if targets and len(targets) == 1:
        name = targets[0]
        is_pattern = name == _ALL_LINEAR or not _PATTERN_CHARACTERS.isdisjoint(name)
        targets = name if is_pattern else targets
    return LoraConfig(
        r=args.lora_rank,
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,
        lora_dropout=args.lora_dropout,
        target_modules=targets or None,
        use_dora=args.use_dora,
    )


def to_text(config: Any) -> str:
    """A configuration object as the text that ``--peft-config`` takes."""
    values = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in config.to_dict().items()
    }
    try:
        return json.dumps(values)
    except TypeError as reason:
        raise ConfigurationError(
            f"peft_config: {type(config).__name__} holds something that cannot be saved: {reason}. "
            "Pass the model itself instead: get_peft_model(model, config)."
        ) from None


def _read_config(source: str) -> Any:
    from peft import PeftConfig

    text, place = source, "--peft-config"
    if not source.lstrip().startswith("{"):
        text, place = Path(source).expanduser().read_text(encoding="utf-8"), source
    try:
        values = parse_json(text)
        values.pop("peft_version", None)
        _check_type(values.get("peft_type"), place)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = PeftConfig.from_peft_type(**values)
    except ConfigurationError:
        raise
    except (ValueError, TypeError, KeyError) as reason:
        raise ConfigurationError(f"{place} is not a configuration of peft: {reason}.") from None
    for warning in caught:
        warn_once(f"{place}: {warning.message}")
    return config


def _check_type(kind: Any, place: str) -> None:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    known = sorted(known.value for known in PEFT_TYPE_TO_CONFIG_MAPPING)
    if kind is not None and kind not in known:
        raise ConfigurationError(
            f"{place}: peft has no peft_type {kind!r}.{suggest(str(kind), known)} It has "
            f"{', '.join(known)}."
        )


def choose_targets(model: Any, config: Any, fresh: Sequence[str]) -> None:
    """Complete the configuration; ``fresh`` are weights that the base model's files lack."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    from rapidformer.compat.peft import list_refused

    # peft knows which layers are usual for an architecture; for others, all linear ones.
    kind = getattr(getattr(model, "config", None), "model_type", None)
    is_lora = config.peft_type.value == "LORA"
    heads = _HEADS.get(config.task_type, ())
    named = (config.target_modules, getattr(config, "target_parameters", None))
    if is_lora and not any(named) and kind not in KNOWN:
        config.target_modules = _ALL_LINEAR
    if getattr(config, "target_modules", None) == _ALL_LINEAR:
        ends = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        refused = list_refused(config, model, sorted(ends))
        _exclude(config, [*list_uncalled(model), *refused, *ends.intersection(heads)])
    modules = dict.fromkeys(name.rpartition(".")[0] for name in fresh)
    added = [name for name in modules if name and not set(name.split(".")) & set(heads)]
    if added and hasattr(config, "modules_to_save"):
        config.modules_to_save = [*(config.modules_to_save or ()), *added]
        _exclude(config, added)


def list_uncalled(model: nn.Module) -> list[str]:
    """Layers whose weights are read by the module around them, so that an adapter never runs."""
    from torch import nn

    from rapidformer.compat.transformers_scans import has_fused_output

    return [
        f"{name}.out_proj".removeprefix(".")
        for name, module in model.named_modules()
        if type(module) is nn.MultiheadAttention or has_fused_output(type(module).forward)
    ]


def check_called(model: nn.Module, uncalled: Sequence[str]) -> None:
    """Refuse adapters without effect."""
    modules = dict(model.named_modules())
    idle = [name for name in uncalled if hasattr(modules.get(name), "base_layer")]
    if idle:
        around, leave = modules[idle[0].rpartition(".")[0]], "Leave it out of --lora-target-modules"
        name = type(around).__name__
        if name == "MultiheadAttention":
            leave += f", or name the module around it: {idle[0].split('.')[-2:][0]}"
        raise ModelError(
            f"an adapter of {idle[0]} would never be trained: {name} does not call this layer, it "
            f"only reads its weight. {leave}."
        )


def forget_excluded(config: Any, adapted: Any) -> None:
    """Name no targets of which every layer was excluded: they are shown at start-up."""
    adapted_layers = [f".{name}" for name in getattr(adapted, "targeted_module_names", ())]
    if adapted_layers and isinstance(config.target_modules, set):
        config.target_modules = {
            target
            for target in config.target_modules
            if any(name.endswith(f".{target}") for name in adapted_layers)
        }


def _exclude(config: Any, names: Sequence[str]) -> None:
    """Do not adapt these modules, unless a pattern already says which not to."""
    if names and hasattr(config, "exclude_modules") and not isinstance(config.exclude_modules, str):
        config.exclude_modules = [*(config.exclude_modules or ()), *names]


def exclude_parts(config: Any, parts: Sequence[str]) -> None:
    """Do not adapt anything inside these modules, unless a pattern says what to adapt."""
    targets = getattr(config, "target_modules", None)
    is_pattern = isinstance(targets, str) and targets != _ALL_LINEAR
    if not parts or is_pattern or not hasattr(config, "exclude_modules"):
        return
    known = config.exclude_modules or ()
    # peft's lists are of endings; only a pattern can say where names begin.
    kept = [known] if isinstance(known, str) else [rf"(.*\.)?{re.escape(name)}" for name in known]
    config.exclude_modules = "|".join([*kept, *(rf"{re.escape(name)}(\..*)?" for name in parts)])


def list_layers(model: nn.Module) -> str:
    names = {
        name.rpartition(".")[2]: None
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D", "Embedding")
    }
    return ", ".join(names) or "none"
