"""A toy for GRPO: a tiny model that knows nothing, and prompts that show it a digit to copy."""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<end>", "copy", ":", *"0123456789"]


def build_toy(folder: Path) -> None:
    """``model`` and ``data`` in the folder, as a user would have them."""
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token=":"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<end>", model_max_length=16
    )
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16, bos_token_id=None, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"copy {digit} :", "digit": str(digit)} for digit in range(10)]
    for split, repeats in (("train", 50), ("validation", 1)):
        lines = [json.dumps(row) + "\n" for row in repeats * rows]
        (folder / "data" / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    build_toy(Path(sys.argv[1]))
