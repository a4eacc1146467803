"""Every text architecture of transformers' own mappings, built small: does it train, and how fast?

    python benchmarks/sweep_models.py [--kinds bert llama ...] [--limit 60] [--compile]
        [--steps 4] [--json FILE]

For each: a plain PyTorch loop and rapidformer on the same weights and rows, without dropout, each
in its own process. Losses must agree to 1e-4 in fp32 (a CPU), to 2 % in bf16 (a GPU). On a GPU,
Hugging Face's Trainer is timed as well, with steps enough for it: --steps 60. The table lists what
fails, what differs and the ten slowest; what the plain loop cannot run at this size is counted.
"""

from __future__ import annotations

import argparse
import inspect
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from held_models import make_skewed_rows
from peers import (
    COMPILED,
    DEVICE,
    HAS_GPU,
    Result,
    Stopwatch,
    call,
    run_rapidformer,
    run_trainer,
    wait,
)
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from workloads import Rows, Workload

from rapidformer.data.collate import PadCollator

WORDS = 160
SIZES = {
    ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "emb_dim",
     "embedding_size", "d_embed", "attention_hidden_size", "residual_size"): 64,
    ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads",
     "decoder_attention_heads", "num_key_value_heads", "num_encoder_attention_heads",
     "num_decoder_attention_heads", "linear_num_key_heads", "linear_num_value_heads"): 4,
    ("head_dim", "d_kv", "kv_channels", "d_head", "attention_head_size", "v_head_dim",
     "linear_key_head_dim", "linear_value_head_dim"): 16,
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
     "num_decoder_layers", "num_encoder_layers"): 2,
    ("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim",
     "d_inner", "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size",
     "shared_intermediate_size"): 96,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): 4,
    ("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"): 2,
    ("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"): 1,
    ("q_lora_rank", "kv_lora_rank"): 16,
    ("qk_rope_head_dim", "qk_nope_head_dim"): 16,
    ("rotary_dim",): 8,
    ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"): 256,
    ("vocab_size", "decoder_vocab_size", "encoder_vocab_size", "src_vocab_size",
     "tgt_vocab_size"): WORDS,
    ("pad_token_id",): 0, ("bos_token_id", "decoder_start_token_id"): 1, ("eos_token_id",): 2,
}  # fmt: skip
"""Names that configurations have for their sizes; those with other ones stay as they are."""
MOST_PARAMETERS = 50e6
FAMILIES = {
    "text": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "pairs": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}


def list_models() -> dict[str, tuple[str, str]]:
    """Kind of model -> what it learns, and its class; the first family that has it."""
    found: dict[str, tuple[str, str]] = {}
    for family in ("pairs", "masked", "text"):
        for kind, names in FAMILIES[family].items():
            name = names if isinstance(names, str) else names[0]
            found.setdefault(kind, (family, name))
    return found


def shrink(config: Any) -> Any:
    """A small configuration without dropout; its sub-configurations as well."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrink(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif "initializer" not in name and isinstance(value, (list, tuple)) and len(value) > 2:
            layers = getattr(config, "num_hidden_layers", None)
            if len(value) == layers:
                setattr(config, name, type(value)([*dict.fromkeys(value), *value][:2]))
    for names, size in SIZES.items():
        for name in names:
            is_unset = name in ("pad_token_id", "head_dim") and hasattr(config, name)
            if isinstance(getattr(config, name, None), int) or is_unset:
                with suppress(AttributeError):  # it follows from others
                    setattr(config, name, size)
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 1
    return config


def build_workload(kind: str) -> Workload:
    family, name = list_models()[kind]

    def build() -> Any:
        config = shrink(AutoConfig.for_model(kind))
        with torch.device("meta"):
            size = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"{size / 1e6:.0f} million parameters: its sizes have other names")
        return getattr(transformers, name)(config)

    def make_rows(count: int) -> Rows:
        return make_skewed_rows(count, "pairs" if family == "pairs" else "text", (6, 60), WORDS)

    return Workload(build=build, make_rows=make_rows, batch=8)


def run_loop(work: Workload, rows: Rows, watch: Stopwatch) -> None:
    """The reference: as ``Trainer`` does it, in a few lines."""
    torch.manual_seed(0)
    with DEVICE:
        model = work.build().train()
    takes = inspect.signature(model.forward).parameters
    options = {"use_cache": False} if "use_cache" in takes else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    steps = len(rows) // work.batch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses = []
    for step in range(steps):
        watch.begin_step()
        batch = PadCollator()(rows[step * work.batch : (step + 1) * work.batch])
        batch = {name: value.to(DEVICE) for name, value in batch.items()}
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=HAS_GPU):
            loss = model(**batch, **options).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    watch.note_loss(float(torch.stack(losses).mean()), steps)


def measure(name: str, kind: str, steps: int, compiles: bool) -> Result:
    work = build_workload(kind)
    warm_up = steps // 2
    rows = work.make_rows(work.batch * steps)
    watch = Stopwatch(warm_up)
    if name == "loop":
        run_loop(work, rows, watch)
    elif name == "HF Trainer":
        run_trainer(work, rows, watch)
    else:
        run_rapidformer(work, rows, watch, **(COMPILED if compiles else {}))
    wait()
    watch.stop()
    tokens = sum(len(row["input_ids"]) for row in rows[warm_up * work.batch :])
    return {"rate": tokens / (watch.stopped - watch.started), "loss": watch.loss}


def judge(result: dict[str, Result]) -> str:
    """What became of a model: ``ok``, ``differs``, ``fails`` or ``not built``."""
    if "problem" in result["loop"]:
        return "not built"
    ours = result["rapidformer"]
    if "problem" in ours:
        return "fails"
    expected, limit = result["loop"]["loss"], 2e-2 if HAS_GPU else 1e-4
    return "ok" if abs(ours["loss"] - expected) <= limit * abs(expected) else "differs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=sorted(list_models()))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=int, default=60, help="seconds for one run")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path, help="keep the figures there; what it has is not run")
    options = parser.parse_args()
    names = ["loop", "rapidformer", *(["HF Trainer"] if HAS_GPU else [])]
    has_file = options.json is not None and options.json.exists()
    results: dict[str, Any] = json.loads(options.json.read_text()) if has_file else {}
    for kind in options.kinds:
        if kind not in results:
            found = {}
            for name in names:
                found[name] = call("fork", options.limit, measure, name, kind, options.steps,
                                   options.compile)  # fmt: skip
                if "problem" in found["loop"]:
                    break
            results[kind] = {"verdict": judge(found), **found}
            print(f"{kind}: {results[kind]}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    report(results)


def report(results: dict[str, Any]) -> None:
    verdicts = [result["verdict"] for result in results.values()]
    counts = ", ".join(f"{verdicts.count(each)} {each}" for each in dict.fromkeys(verdicts))
    print(f"\n{len(results)} architectures: {counts}")
    for kind, result in results.items():
        if result["verdict"] in ("fails", "differs"):
            print(f"  {kind} {result['verdict']}: {result['rapidformer']}, loop {result['loop']}")
    base = "HF Trainer" if HAS_GPU else "loop"
    ratios = {
        kind: result["rapidformer"]["rate"] / result[base]["rate"]
        for kind, result in results.items()
        if "rate" in result.get("rapidformer", {}) and "rate" in result.get(base, {})
    }
    print(f"the ten slowest, against {base}:")
    for kind in sorted(ratios, key=lambda kind: ratios[kind])[:10]:
        print(f"  {kind}: {ratios[kind]:.2f} x")


if __name__ == "__main__":
    main()
