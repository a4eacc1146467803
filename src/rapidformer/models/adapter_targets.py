"""Which of a model's layers get adapters, and which are trained and saved whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rapidformer.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

ALL_LINEAR = "all-linear"
# Heads that peft trains and saves whole, by task.
_HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}


def choose_targets(model: Any, config: Any, fresh: Sequence[str]) -> None:
    """Complete the configuration: the layers to adapt, and modules to train whole.

    ``fresh`` names weights that the base model's files do not have.
    """
    _choose_usual(model, config)
    if getattr(config, "target_modules", None) == ALL_LINEAR:
        _exclude(config, list_uncalled(model))
    _train_fresh(config, fresh)


def _choose_usual(model: Any, config: Any) -> None:
    """peft knows which layers are usual for an architecture; for others, all linear ones."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    kind = getattr(getattr(model, "config", None), "model_type", None)
    is_lora = config.peft_type.value == "LORA"
    named = (config.target_modules, getattr(config, "target_parameters", None))
    if is_lora and not any(named) and kind not in KNOWN:
        config.target_modules = ALL_LINEAR


def list_uncalled(model: nn.Module) -> list[str]:
    """Layers whose weights are read by the module around them, so that an adapter never runs."""
    from torch import nn

    return [
        f"{name}.out_proj".removeprefix(".")
        for name, module in model.named_modules()
        if type(module) is nn.MultiheadAttention
    ]


def check_called(model: nn.Module, uncalled: Sequence[str]) -> None:
    """Refuse adapters without effect."""
    modules = dict(model.named_modules())
    idle = [name for name in uncalled if hasattr(modules.get(name), "base_layer")]
    if idle:
        raise ModelError(
            f"an adapter of {idle[0]} would never be trained: nn.MultiheadAttention does not call "
            "this layer, it only reads its weight. Leave it out of --lora-target-modules, or name "
            f"the module around it: {idle[0].split('.')[-2:][0]}."
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


def _train_fresh(config: Any, fresh: Sequence[str]) -> None:
    modules = dict.fromkeys(name.rpartition(".")[0] for name in fresh)
    heads = _HEADS.get(config.task_type, ())
    added = [name for name in modules if name and not set(name.split(".")) & set(heads)]
    if not added or not hasattr(config, "modules_to_save"):
        return
    config.modules_to_save = [*(config.modules_to_save or ()), *added]
    _exclude(config, added)


def _exclude(config: Any, names: Sequence[str]) -> None:
    """Do not adapt these modules, unless a pattern already says which not to."""
    if names and hasattr(config, "exclude_modules") and not isinstance(config.exclude_modules, str):
        config.exclude_modules = [*(config.exclude_modules or ()), *names]


def list_layers(model: nn.Module) -> str:
    names = {
        name.rpartition(".")[2]: None
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D", "Embedding")
    }
    return ", ".join(names) or "none"
