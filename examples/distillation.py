"""A small student learns sums from a larger teacher: in seconds on a CPU, without a download.

The teacher is trained on rows with answers. The student sees the same rows, but learns only what
the teacher thinks of each next token (`distillation_alpha=1`). With models and data of your own,
this is one command (docs/distillation.md).
"""

import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import rapidformer

WORDS = ["<pad>", "<end>", "<unknown>", "+", "=", *map(str, range(19))]
ROWS = [
    {"prompt": f"{a} + {b} =", "response": f" {a + b}"} for a in range(10) for b in range(a, 10)
]


def make_model(folder: Path, *, width: int, layers: int) -> str:
    """A model with fresh weights and its tokenizer, as ``from_pretrained`` finds them."""
    known = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(known, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", model_max_length=16
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * width, max_position_embeddings=16, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def main(folder: Path) -> None:
    common = {"epochs": 1, "micro_batch_size": len(ROWS), "weight_decay": 0.0, "progress": False}
    data = {"train": 80 * ROWS, "validation": ROWS}
    teacher = make_model(folder / "teacher", width=64, layers=2)
    rapidformer.train(
        data, task="causal_lm", load=teacher, save=str(folder / "taught"), lr=7e-3, **common
    )
    student = make_model(folder / "student", width=32, layers=1)
    asked = {"task": "distillation", "teacher": str(folder / "taught"), "distillation_alpha": 1.0}
    before = rapidformer.evaluate(ROWS, load=student, allow_untrained=True, **asked).metrics
    after = rapidformer.train(
        data, load=student, save=str(folder / "distilled"), lr=2e-2, **asked, **common
    )
    for name in ("divergence_loss", "accuracy"):
        print(f"{name:16} {before[name]:8.4f} -> {after[name]:.4f}")
    print(rapidformer.predict({"prompt": "4 + 5 ="}, load=str(folder / "distilled")))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
