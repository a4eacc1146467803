"""``rapidformer predict`` beside Hugging Face's pipeline and ``generate``, on one GPU in bf16.

    python benchmarks/predictions.py [--rows 100000] [--prompts 512] [--peer-part 0.1] [--batch 64]

Classification: BERT-base, texts of 5 to 60 words. Generation: 256 tokens each with a Llama of 1.2
billion weights, prompts of 16 to 256 words. All in batches of one size. The peer gets a part of the
rows, in their order; times include tokenizing, ours includes loading the model.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import DEVICE, HAS_GPU, wait
from transformers import BertConfig, BertForSequenceClassification
from workloads import build_word_tokenizer, list_workloads, make_bert_config

from rapidformer import predict

WORDS = 20_000 if HAS_GPU else 500
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32


def get_settings(options: argparse.Namespace) -> dict[str, Any]:
    precision = "bf16" if HAS_GPU else None
    return {
        "eval_micro_batch_size": options.batch, "progress": False, "mixed_precision": precision
    }  # fmt: skip


def make_texts(count: int, shortest: int, longest: int) -> list[str]:
    random = np.random.default_rng(0)
    lengths = random.integers(shortest, longest + 1, count)
    return [" ".join(f"w{n}" for n in random.integers(0, WORDS, length)) for length in lengths]


def save(model: Any, folder: Path, *, classifies: bool) -> str:
    model.to(DTYPE).save_pretrained(folder)
    build_word_tokenizer(WORDS, has_frame=classifies, length=512).save_pretrained(folder)
    return str(folder)


def classify(folder: Path, options: argparse.Namespace) -> None:
    from transformers import pipeline

    torch.manual_seed(0)
    with DEVICE:
        config = make_bert_config("base" if HAS_GPU else "small")
        assert isinstance(config, BertConfig)
        where = save(BertForSequenceClassification(config), folder, classifies=True)
    texts = make_texts(options.rows, 5, 60)
    part = texts[: max(int(len(texts) * options.peer_part), options.batch)]
    peer = pipeline("text-classification", model=where, device=DEVICE, dtype=DTYPE)
    peer(part[: options.batch], batch_size=options.batch)
    wait()
    started = time.perf_counter()
    theirs = peer(part, batch_size=options.batch)
    theirs_rate = len(part) / (time.perf_counter() - started)
    settings = get_settings(options)
    started = time.perf_counter()
    mine = predict(texts, task="sequence_classification", load=where, **settings)
    seconds = time.perf_counter() - started
    far = max(abs(a["score"] - b["score"]) for a, b in zip(mine, theirs, strict=False))
    report("classification", "rows", len(texts) / seconds, theirs_rate, f"scores within {far:.1e}")


def generate(folder: Path, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    work = list_workloads("full" if HAS_GPU else "tiny")["llama1b"]
    with DEVICE:
        model: Any = work.build()
    model.config.pad_token_id, model.config.eos_token_id = 0, None
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    where = save(model, folder, classifies=False)
    prompts = make_texts(options.prompts, 16, 256 if HAS_GPU else 32)
    part = prompts[: max(int(len(prompts) * options.peer_part), options.batch)]
    tokenizer = build_word_tokenizer(WORDS, has_frame=False, length=512)
    tokenizer.padding_side = "left"
    model.eval()
    wait()
    started = time.perf_counter()
    for first in range(0, len(part), options.batch):
        batch = tokenizer(part[first : first + options.batch], padding=True, return_tensors="pt")
        batch.pop("token_type_ids", None)
        ids = model.generate(
            **batch.to(DEVICE), max_new_tokens=options.tokens, min_new_tokens=options.tokens,
            do_sample=False,
        )  # fmt: skip
        tokenizer.batch_decode(ids)
    wait()
    theirs_rate = len(part) * options.tokens / (time.perf_counter() - started)
    del model
    settings = get_settings(options)
    started = time.perf_counter()
    predict(
        prompts, task="causal_lm", load=where, max_new_tokens=options.tokens, do_sample=False,
        allow_untrained=True, **settings,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    report("generation", "tokens", len(prompts) * options.tokens / seconds, theirs_rate, "")


def report(what: str, unit: str, ours: float, theirs: float, more: str) -> None:
    ratio = f"{ours / theirs:.1f}x"
    line = (what, f"{theirs:,.0f} {unit}/s", f"{ours:,.0f} {unit}/s", ratio, more)
    print("|", " | ".join(line), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--peer-part", type=float, default=0.1)
    options = parser.parse_args()
    print("| | Hugging Face | rapidformer | ratio | |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        classify(Path(folder) / "classifier", options)
        generate(Path(folder) / "generator", options)


if __name__ == "__main__":
    main()
