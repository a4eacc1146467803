"""QLoRA: the frozen weights of a model in 4 or 8 bits, by bitsandbytes; adapters stay in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rapidformer.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn


def get_quantization(args: Any) -> dict[str, Any]:
    """What ``from_pretrained`` needs for ``--quantize-base``; nothing without it."""
    if args.quantize_base is None:
        return {}
    import torch
    from transformers import BitsAndBytesConfig

    has_gpu = torch.cuda.is_available() and args.device != "cpu"
    if args.quantize_base == "8bit" and not has_gpu:
        raise ConfigurationError(
            "--quantize-base 8bit needs a GPU: on a CPU, bitsandbytes trains with such weights but "
            "cannot save them. Use --quantize-base 4bit."
        )
    if args.quantize_base == "8bit":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    device = torch.cuda.current_device() if has_gpu else "cpu"
    # Quantized weights are made on their device, and never moved.
    return {"quantization_config": config, "device_map": {"": device}}


def prepare_quantized(model: nn.Module, args: Any) -> nn.Module:
    """Freeze a quantized model and keep its norms in fp32, as peft recommends."""
    if args.quantize_base is None:
        return model
    from peft import prepare_model_for_kbit_training

    # Recompute is a switch of ours, not of the model.
    prepared: nn.Module = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return prepared
