"""QLoRA: the frozen weights of a model in 4 or 8 bits, by bitsandbytes; adapters stay in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rapidformer.config import Settings
from rapidformer.config.sections import AdapterArguments
from rapidformer.errors import ModelError
from rapidformer.log import warn_once

if TYPE_CHECKING:
    from torch import nn


def get_quantization(args: Settings) -> dict[str, Any]:
    """What ``from_pretrained`` needs for ``--quantize-base``; nothing without it."""
    if args.quantize_base is None:
        return {}
    import torch
    from transformers import BitsAndBytesConfig

    has_gpu = torch.cuda.is_available() and args.device != "cpu"
    if args.quantize_base == "8bit":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
    device = torch.cuda.current_device() if has_gpu else "cpu"
    # Quantized weights are made on their device, and never moved.
    return {"quantization_config": config, "device_map": {"": device}}


def prepare_quantized(model: nn.Module, args: AdapterArguments) -> nn.Module:
    """Freeze a quantized model and keep its norms in fp32, as peft recommends."""
    if args.quantize_base is None:
        return model
    from peft import prepare_model_for_kbit_training

    # Recompute is a switch of ours, not of the model.
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def forget_quantization(config: Any, base: str, *, merges: bool = True) -> None:
    """Describe a run's model as its base's files have it; merged, it gives other outputs."""
    if getattr(config, "quantization_config", None) is None:
        return
    from transformers import PreTrainedConfig

    if PreTrainedConfig.get_config_dict(base)[0].get("quantization_config"):
        raise ModelError(
            f"the files of {base} are quantized, so an adapter cannot be merged into its weights: "
            "export the adapter alone, then name the same model in full precision "
            "(rapidformer export ADAPTER FOLDER --base MODEL)."
        )
    del config.quantization_config
    if merges:
        warn_once(
            f"the adapter was trained on quantized weights and is merged into those of {base} in "
            "full precision: outputs differ slightly from those in training."
        )
