"""peft's configuration of the adapters that the settings ask for."""

from __future__ import annotations

import difflib
import json
import warnings
from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.errors import ConfigurationError
from rapidformer.log import warn_once
from rapidformer.models.adapter_targets import ALL_LINEAR

_PATTERN_CHARACTERS = frozenset(".*+?[](){}|^$\\")


def build_config(args: Settings) -> Any | None:
    """peft's configuration of the adapters that the settings ask for; None without any."""
    if args.peft_config is not None:
        return _read_config(args.peft_config)
    if args.lora_rank is None:
        return None
    from peft import LoraConfig

    alpha = args.lora_alpha or 2 * args.lora_rank
    return LoraConfig(
        r=args.lora_rank,
        lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,
        lora_dropout=args.lora_dropout,
        target_modules=_read_targets(args.lora_target_modules),
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


def _read_targets(given: list[str] | None) -> str | list[str] | None:
    if not given or len(given) > 1:
        return given or None
    is_pattern = given[0] == ALL_LINEAR or not _PATTERN_CHARACTERS.isdisjoint(given[0])
    return given[0] if is_pattern else given


def _read_config(source: str) -> Any:
    from peft import PeftConfig

    text, place = source, "--peft-config"
    if not source.lstrip().startswith("{"):
        text, place = Path(source).expanduser().read_text(encoding="utf-8"), source
    try:
        values = json.loads(text)
        values.pop("peft_version", None)
        _check_type(values.get("peft_type"), place)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = PeftConfig.from_peft_type(**values)
    except (ValueError, TypeError, KeyError) as reason:
        raise ConfigurationError(f"{place} is not a configuration of peft: {reason}.") from None
    for each in caught:
        warn_once(f"{place}: {each.message}")
    return config


def _check_type(given: Any, place: str) -> None:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    known = sorted(kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING)
    if given is not None and given not in known:
        near = difflib.get_close_matches(str(given).upper(), known, n=1)
        raise ConfigurationError(
            f"{place}: peft has no peft_type {given!r}."
            + (f" Did you mean {near[0]}?" if near else "")
            + f" It has {', '.join(known)}."
        )
