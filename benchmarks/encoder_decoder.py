"""Time of a training step of an encoder-decoder model, padded and with ``--dynamic-shape``.

    python benchmarks/encoder_decoder.py [--kind t5|bart] [--width 256] [--layers 4] [--rows 16]

Rows of 20 to 99 tokens on both sides. The two models take turns on the same batches, forward and
backward pass; on a CPU, one thread and CPU seconds, on a GPU, bf16 and the best of three rounds.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from rapidformer.accel.attention.kernel_order import apply_bias_layout
from rapidformer.accel.unpad.unpadding import apply_unpadding
from rapidformer.models.plan import find_plan

WORDS, BATCHES, ROUNDS = 2000, 6, 3
IS_ON_GPU = torch.cuda.is_available()


def build(kind: str, width: int, layers: int) -> Any:
    torch.manual_seed(0)
    heads, inner = max(width // 64, 1), 4 * width
    config = AutoConfig.for_model(
        kind, vocab_size=WORDS, d_model=width, d_kv=width // heads, d_ff=inner, num_layers=layers,
        num_heads=heads, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=inner,
        decoder_ffn_dim=inner, max_position_embeddings=128, decoder_start_token_id=0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config).train()
    apply_bias_layout(model)
    return model.cuda() if IS_ON_GPU else model


def make_batches(rows: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def draw(filler: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.randint(20, 100, (rows,), generator=generator)
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return torch.randint(5, WORDS, mask.shape, generator=generator).where(mask, filler), mask

    batches = []
    for _ in range(BATCHES):
        (ids, mask), (labels, _) = draw(0), draw(-100)
        batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
        batches.append({k: v.cuda() if IS_ON_GPU else v for k, v in batch.items()})
    return batches


def measure(model: Any, batch: dict[str, torch.Tensor]) -> float:
    clock = time.perf_counter if IS_ON_GPU else time.process_time
    start = clock()
    with torch.autocast("cuda", torch.bfloat16, enabled=IS_ON_GPU):
        loss = model(**batch).loss
    loss.backward()
    model.zero_grad()
    if IS_ON_GPU:
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["t5", "bart"], default="t5")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    padded, unpadded = (build(args.kind, args.width, args.layers) for _ in range(2))
    refused = apply_unpadding(unpadded, find_plan(unpadded), torch.bfloat16 if IS_ON_GPU else None)
    if refused is not None:
        raise SystemExit(f"stays padded: {refused}")
    batches = make_batches(args.rows)
    times: dict[str, list[float]] = {"padded": [], "unpadded": []}
    for _ in range(ROUNDS):
        totals = dict.fromkeys(times, 0.0)
        for batch in batches:
            for name, model in (("padded", padded), ("unpadded", unpadded)):
                totals[name] += measure(model, batch)
        for name, total in totals.items():
            times[name].append(total / BATCHES)
    best = {name: min(values) for name, values in times.items()}
    print({name: f"{1000 * value:.1f} ms" for name, value in best.items()})
    print(f"ratio {best['padded'] / best['unpadded']:.2f}")


if __name__ == "__main__":
    main()
