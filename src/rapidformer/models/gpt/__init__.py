"""``GPTModel`` and its configuration; importing this registers them with transformers."""

from transformers import AutoConfig, AutoModelForCausalLM

from rapidformer.models.gpt.configuration import GPTConfig, config_from_arguments
from rapidformer.models.gpt.model import GPTForCausalLM, GPTModel

AutoConfig.register(GPTConfig.model_type, GPTConfig, exist_ok=True)
AutoModelForCausalLM.register(GPTConfig, GPTForCausalLM, exist_ok=True)

__all__ = ["GPTConfig", "GPTForCausalLM", "GPTModel", "config_from_arguments"]
