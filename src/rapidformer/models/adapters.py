"""LoRA and other adapters: peft builds them, inside the model that was given.

    model = add_adapters(model, args)

The model's layers are replaced in place, so its class, its blocks and ``generate`` stay as they
were, and every switch sees a model with frozen weights. Only methods that prepend learned tokens
(prompt and prefix tuning) need peft's own class around the model.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.errors import ConfigurationError, ModelError
from rapidformer.models import adapter_config
from rapidformer.models.adapter_config import build_config
from rapidformer.models.towers import get_text_config, list_left_out
from rapidformer.overlay import extend

if TYPE_CHECKING:
    from torch import nn

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the names of a model's weights in an adapter's file."""
_MOST_TARGETS = 8
_TASK_TYPES = {
    "ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS", "ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapter of a model, as peft describes it."""

    config: Any
    name: str
    base: str | None
    """Folder or Hub name of the frozen model; None if it cannot be loaded again."""

    @property
    def is_prompt(self) -> bool:
        """Whether it prepends learned tokens instead of changing layers."""
        return bool(self.config.is_prompt_learning)

    @property
    def prepends_tokens(self) -> bool:
        """Whether rows get longer, so that a row's first label is predicted as well."""
        return self.is_prompt and self.config.peft_type.value != "PREFIX_TUNING"

    def describe(self) -> str:
        """The method and where it is applied, for the start-up lines."""
        config = self.config
        kind = "DoRA" if getattr(config, "use_dora", False) else config.peft_type.value
        rank = f", rank {config.r}" if hasattr(config, "r") else ""
        targets = getattr(config, "target_modules", None)
        if isinstance(targets, (set, list)):
            # peft names every layer of a small model by its full path.
            is_long = len(targets) > _MOST_TARGETS
            targets = sorted({name.rpartition(".")[2] if is_long else name for name in targets})
        listed = ", ".join(targets) if isinstance(targets, list) else targets
        return f"{kind}{rank}" + (f" on {listed}" if listed else "")


def describe_adapter(adapter: Adapter, model: nn.Module) -> str:
    """The adapter, and how much of the model is trained."""
    # Under DeepSpeed's stage 3, a weight holds nothing but its size.
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size * used for size, used in sizes)
    return f"{adapter.describe()}; {describe_trained(trained, total)}"


def describe_untrainable(adapter: Adapter) -> str:
    """What to do if every weight of the model is frozen, those of the adapter too."""
    if adapter.is_prompt:
        return (
            f"peft cannot continue to train the learned tokens of {adapter.config.peft_type.value}:"
            " start again from the base model."
        )
    return (
        "the model's adapter is frozen, so there is nothing to train: load it with "
        "PeftModel.from_pretrained(model, folder, is_trainable=True)."
    )


def describe_trained(trained: int, total: int) -> str:
    """How many of the parameters are trained."""
    return f"trainable {trained:,} of {total:,} parameters ({100 * trained / max(total, 1):.2f} %)"


def add_adapters(model: nn.Module, args: Settings, *, fresh: Sequence[str] = ()) -> nn.Module:
    """The model with the adapters of the settings; as it is if it has some, or none are wanted.

    ``fresh`` names weights that the base model's files do not have: their modules are trained and
    saved with the adapters, which would otherwise depend on this run's random numbers.
    """
    config = None if find_adapter(model) is not None else build_config(args)
    if config is None:
        return model
    return apply_adapters(model, config, fresh, left_out=list_left_out(model, args))


def apply_adapters(
    model: Any, config: Any, fresh: Sequence[str] = (), *, left_out: Sequence[str] = ()
) -> nn.Module:
    """Freeze the model and add the adapters, in place; none inside the modules ``left_out``."""
    from peft import get_peft_model

    config.inference_mode = False
    config.base_model_name_or_path = None
    if config.task_type is None:
        config.task_type = _find_task_type(model)
    if not config.is_prompt_learning:
        adapter_config.choose_targets(model, config, fresh)
        adapter_config.exclude_parts(config, left_out)
    elif config.task_type is None:
        raise ConfigurationError(
            f"{config.peft_type.value} needs a language model or a classifier of transformers; "
            f"{type(model).__name__} is neither. Use --lora-rank instead."
        )
    uncalled = adapter_config.list_uncalled(model)
    with _explain(model, config):
        adapted = get_peft_model(model, config)
    inner = get_inner(adapted)
    adapter_config.check_called(inner, uncalled)
    if getattr(config, "exclude_modules", None):
        adapter_config.forget_excluded(config, adapted)
    return inner


def _find_task_type(model: Any) -> str | None:
    class_name = type(model).__name__
    if class_name.endswith("ForConditionalGeneration"):
        # Without an encoder, it is the class of a decoder that also sees or hears.
        return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    kinds = (kind for ending, kind in _TASK_TYPES.items() if class_name.endswith(ending))
    return next(kinds, None)


def call_adapted_layers(model: nn.Module) -> bool:
    """Keep torch's own encoder layers from a shortcut around their adapters; False without any.

    In evaluation, nn.TransformerEncoderLayer passes its layers' weights to one kernel, unless one
    of its parts has a hook. Nested tensors, which nn.TransformerEncoder makes, need that kernel.
    """
    from torch import nn

    layers = [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer)]
    for layer in layers:
        layer.register_forward_pre_hook(_be_called)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return bool(layers)


def _be_called(module: nn.Module, inputs: Any) -> None:
    """A hook that does nothing but be there."""


def get_inner(model: Any) -> nn.Module:
    """The model inside a ``PeftModel``, which holds all of its weights; other models unchanged."""
    # By name: a run without adapters must not import peft.
    is_wrapped = any(
        cls.__name__ == "PeftModel" and cls.__module__ == "peft.peft_model"
        for cls in type(model).__mro__
    )
    if not is_wrapped or model.active_peft_config.is_prompt_learning:
        return model
    return model.get_base_model()


def get_base(model: Any) -> Any:
    """The model inside an adapter of any kind, whose class need not say what it adapts."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_adapter(model: Any) -> Adapter | None:
    """What is known about a model's adapter; None if it has none."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not configs:
        return None
    name = next(iter(configs))
    if len(configs) > 1:
        # A list in peft's layers; models of transformers have a method of that name.
        lists = (getattr(module, "active_adapters", None) for module in model.modules())
        name = next((names[0] for names in lists if isinstance(names, list) and names), name)
    config = configs[name]
    return Adapter(config=config, name=name, base=config.base_model_name_or_path or None)


def hide_learned_tokens(model: nn.Module) -> nn.Module:
    """Make a model with learned tokens before each row return logits for the row's own tokens."""
    adapter = find_adapter(model)
    if adapter is not None and adapter.prepends_tokens:
        extend(model, "prompt", _build_row_logits)
    return model


def _build_row_logits(cls: Any) -> dict[str, Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = cls.forward(self, *args, **kwargs)
        logits = getattr(output, "logits", None)
        if logits is not None and logits.dim() == 3:
            output.logits = logits[:, self.active_peft_config.num_virtual_tokens :]
        return output

    return {"forward": forward}


def forget_base(model: nn.Module) -> None:
    """Note that the frozen weights are in no file: they were initialised in this run."""
    adapter = find_adapter(model)
    if adapter is not None:
        adapter.config.base_model_name_or_path = None


def forget_resized_base(model: Any) -> str | None:
    """Note it if the model has other words than its files: an adapter alone would not load."""
    adapter = find_adapter(model)
    if adapter is None or adapter.base is None or not Path(adapter.base).is_dir():
        return None
    from transformers import PreTrainedConfig

    saved = PreTrainedConfig.get_config_dict(adapter.base)[0]
    before = (saved.get("text_config") or saved).get("vocab_size")
    now = getattr(get_text_config(model.config), "vocab_size", None)
    if before is None or now is None or before == now:
        return None
    forget_base(model)
    return (
        f"the model has {now} words, its files in {adapter.base} have {before}: checkpoints hold "
        "all weights, not only the adapter's, and best/ and last/ are merged models."
    )


@contextmanager
def _explain(model: nn.Module, config: Any) -> Iterator[None]:
    """peft's refusals as one sentence; its warnings about layouts it handles are dropped."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ValueError, TypeError, NotImplementedError, AttributeError, re.error) as reason:
        text = " ".join(str(reason).split()).rstrip(".")
        raise ModelError(
            f"{config.peft_type.value} adapters cannot be added to {type(model).__name__}: {text}. "
            f"Its linear and embedding layers are {adapter_config.list_layers(model)}: choose with "
            "--lora-target-modules."
        ) from None
