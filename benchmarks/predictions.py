"""``predict`` and ``evaluate`` beside Hugging Face's pipeline, Trainer and ``generate``, in bf16.

    python benchmarks/predictions.py [--works predict evaluate generate] [--rows 100000]
        [--prompts 512] [--tokens 256] [--batch 64] [--peer-part 0.1]
        [--prompt-batch 512] [--peer-prompts 512]

predict and evaluate: BERT-base, texts of 5 to 60 words. generate: --tokens each with a Llama of 1.2
billion weights, prompts of 16 to 256 words; --prompt-batch is another size of its batches. All in
batches of one size. The peer gets a part of the rows, in their order, and is warm: --peer-part, or
--peer-prompts for generation. Times include tokenizing, ours includes loading the model.
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
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)
from workloads import build_word_tokenizer, list_workloads, make_bert_config

from rapidformer import evaluate, predict

WORDS = 20_000 if HAS_GPU else 500
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32


def get_settings(batch: int) -> dict[str, Any]:
    precision = "bf16" if HAS_GPU else None
    return {
        "eval_micro_batch_size": batch, "progress": False, "mixed_precision": precision
    }  # fmt: skip


def make_texts(count: int, shortest: int, longest: int) -> list[str]:
    random = np.random.default_rng(0)
    lengths = random.integers(shortest, longest + 1, count)
    return [" ".join(f"w{n}" for n in random.integers(0, WORDS, length)) for length in lengths]


def save(model: Any, folder: Path, *, classifies: bool) -> str:
    model.to(DTYPE).save_pretrained(folder)
    build_word_tokenizer(WORDS, has_frame=classifies, length=512).save_pretrained(folder)
    return str(folder)


def save_classifier(folder: Path) -> str:
    torch.manual_seed(0)
    with DEVICE:
        config = make_bert_config("base" if HAS_GPU else "small")
        assert isinstance(config, BertConfig)
        return save(BertForSequenceClassification(config), folder, classifies=True)


def classify(folder: Path, options: argparse.Namespace) -> None:
    from transformers import pipeline

    where = save_classifier(folder)
    texts = make_texts(options.rows, 5, 60)
    part = texts[: max(int(len(texts) * options.peer_part), options.batch)]
    peer = pipeline("text-classification", model=where, device=DEVICE, dtype=DTYPE)
    peer(part[: options.batch], batch_size=options.batch)
    wait()
    started = time.perf_counter()
    theirs = peer(part, batch_size=options.batch)
    theirs_rate = len(part) / (time.perf_counter() - started)
    settings = get_settings(options.batch)
    started = time.perf_counter()
    mine = predict(texts, task="sequence_classification", load=where, **settings)
    seconds = time.perf_counter() - started
    far = max(abs(a["score"] - b["score"]) for a, b in zip(mine, theirs, strict=False))
    more = f"{len(part):,} of {len(texts):,} rows for the peer; scores within {far:.1e}"
    report("predict", "rows", len(texts) / seconds, theirs_rate, more)


def evaluate_classifier(folder: Path, options: argparse.Namespace) -> None:
    where = save_classifier(folder)
    texts = make_texts(options.rows, 5, 60)
    labels = np.random.default_rng(1).integers(0, 2, len(texts)).tolist()
    rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    part = rows[: max(int(len(rows) * options.peer_part), options.batch)]
    theirs_rate, their_loss = evaluate_as_peer(where, folder, part, options.batch)
    settings = get_settings(options.batch)
    started = time.perf_counter()
    mine = evaluate(rows, task="sequence_classification", load=where, **settings)
    seconds = time.perf_counter() - started
    same = evaluate(part, task="sequence_classification", load=where, **settings)
    off = abs(same.metrics["loss"] - their_loss)
    more = f"{len(part):,} of {len(rows):,} rows for the peer; its loss within {off:.1e}"
    report("evaluate", "rows", mine.examples / seconds, theirs_rate, more)


def evaluate_as_peer(
    where: str, folder: Path, rows: list[dict[str, Any]], batch: int
) -> tuple[float, float]:
    """Hugging Face's Trainer: rows per second with tokenizing, and the mean loss."""
    tokenizer = AutoTokenizer.from_pretrained(where)
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_eval_batch_size=batch, bf16=HAS_GPU,
        use_cpu=not HAS_GPU, report_to=[], disable_tqdm=True,
        dataloader_num_workers=2 if HAS_GPU else 0,
    )  # fmt: skip
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(where, dtype=DTYPE),
        args=arguments, data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda both: {"accuracy": (both[0].argmax(-1) == both[1]).mean()},
    )  # fmt: skip

    def encode(some: list[dict[str, Any]]) -> list[dict[str, Any]]:
        ids = tokenizer([row["text"] for row in some], truncation=True)["input_ids"]
        return [
            {"input_ids": each, "labels": row["label"]} for each, row in zip(ids, some, strict=True)
        ]

    trainer.evaluate(encode(rows[:batch]))
    wait()
    started = time.perf_counter()
    metrics = trainer.evaluate(encode(rows))
    return len(rows) / (time.perf_counter() - started), metrics["eval_loss"]


def generate(folder: Path, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    work = list_workloads("full" if HAS_GPU else "tiny")["llama1b"]
    with DEVICE:
        model: Any = work.build()
    model.config.pad_token_id, model.config.eos_token_id = 0, None
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    where = save(model, folder, classifies=False)
    prompts = make_texts(options.prompts, 16, 256 if HAS_GPU else 32)
    size = options.prompt_batch or options.batch
    count = options.peer_prompts or max(int(len(prompts) * options.peer_part), size)
    part = prompts[:count]
    tokenizer = build_word_tokenizer(WORDS, has_frame=False, length=512)
    tokenizer.padding_side = "left"
    model.eval()
    wait()
    started = time.perf_counter()
    for first in range(0, len(part), size):
        batch = tokenizer(part[first : first + size], padding=True, return_tensors="pt")
        batch.pop("token_type_ids", None)
        ids = model.generate(
            **batch.to(DEVICE), max_new_tokens=options.tokens, min_new_tokens=options.tokens,
            do_sample=False,
        )  # fmt: skip
        tokenizer.batch_decode(ids)
    wait()
    theirs_rate = len(part) * options.tokens / (time.perf_counter() - started)
    del model
    settings = get_settings(size)
    started = time.perf_counter()
    predict(
        prompts, task="causal_lm", load=where, max_new_tokens=options.tokens, do_sample=False,
        allow_untrained=True, **settings,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    more = f"{len(part):,} of {len(prompts):,} prompts for the peer"
    report("generate", "tokens", len(prompts) * options.tokens / seconds, theirs_rate, more)


def report(what: str, unit: str, ours: float, theirs: float, more: str) -> None:
    ratio = f"{ours / theirs:.1f}x"
    line = (what, f"{theirs:,.0f} {unit}/s", f"{ours:,.0f} {unit}/s", ratio, more)
    print("|", " | ".join(line), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    works = {"predict": classify, "evaluate": evaluate_classifier, "generate": generate}
    parser.add_argument("--works", nargs="+", choices=works, default=list(works))
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--peer-part", type=float, default=0.1)
    parser.add_argument("--prompt-batch", type=int, help="of generation (default: --batch)")
    parser.add_argument("--peer-prompts", type=int, help="instead of --peer-part of them")
    options = parser.parse_args()
    print("| | Hugging Face | rapidformer | ratio | |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.works:
            works[name](Path(folder) / name, options)


if __name__ == "__main__":
    main()
