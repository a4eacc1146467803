"""Rows applied to the model as built and its own weights: host, blocks, then weights."""

from __future__ import annotations

from rapidformer.config.effect import Effect
from rapidformer.config.row import Rule, Switch, register

NEW_DROPOUT = "; dropout only in distribution"
LEARNED_TOKENS = {
    "prompt": "its learned tokens are outside the layers. Use --zero-3-memory-optimization, or "
    "LoRA (--lora-rank)"
}
SHARD_INSTEAD = "Use --zero-3-memory-optimization"


def not_with_images(reason: str) -> Rule:
    """What cannot be done to batches in which pixels of all images stand in one tensor."""
    return Rule(setting="task", values=("image_text",), reason=reason)


WHOLE = register(
    Switch(
        "no cache in training",
        "models of transformers fill no key/value cache when a loss is computed",
        kind="always", module="cache", moment="whole", only_in="training", exact="yes",
    ),
    Switch(
        "host masks",
        "transformers' questions about padding and positions are answered from host memory",
        kind="always", module="host_masks", moment="whole", exact="yes",
    ),
    Switch(
        "adapted layers", "torch's fused encoder layer, which would bypass adapters, is not used",
        kind="always", module="lean_adapters:apply_adapted_layers", moment="whole", is_needed=True,
        exact="yes",
    ),
    # Before the rest, so that no rank processes blocks that it will not keep.
    Switch(
        "pipeline", turned_on_by=("pipeline_model_parallel_size",),
        options=("pipeline_schedule", "num_layers_per_virtual_pipeline_stage"),
        module="pipeline.pipeline", moment="whole", excludes_adapters=LEARNED_TOKENS,
        excludes=(not_with_images(f"stages exchange tokens, not images. {SHARD_INSTEAD}"),),
        exact=f"to 6e-6{NEW_DROPOUT}", effect=Effect(divides="blocks"),
    ),
    Switch(
        "DeepSpeed", turned_on_by=("deepspeed",), module="deepspeed.strategy", moment="whole",
        only_in="training",
        excludes=(
            Rule("pipeline", "use a pipeline with --zero-1-memory-optimization instead of "
                 "DeepSpeed"),
            Rule("sequence parallelism", "use it with --tensor-model-parallel-size and without "
                 "DeepSpeed"),
            Rule("context parallelism", "use --zero-3-memory-optimization instead of DeepSpeed"),
            Rule("expert parallelism", "use --zero-1-memory-optimization instead of DeepSpeed"),
            Rule("hybrid sharding", "set zero_optimization.zero_hpz_partition_size in its file "
                 "instead"),
            Rule("fp8", "use --zero-3-memory-optimization instead of DeepSpeed"),
        ),
        verification="refused",
        why="verify cannot read the gradients that DeepSpeed keeps internally: verify the same "
        "stage with --zero-1-, --zero-2- or --zero-3-memory-optimization instead",
        exact="to 2e-6, unless its file asks for 16 bits",
    ),
    Switch(
        "fp32 weights", "weights that are trained in mixed precision are kept in fp32",
        kind="automatic", module="precision.autocast:keep_fp32_weights", moment="weights",
        precisions=("fp16", "bf16"), is_needed=True, exact="yes",
    ),
    # After it: frozen weights alone are rounded again.
    Switch(
        "lean adapters",
        "frozen linear layers under adapters are kept in 16 bits, and inputs are cast once",
        kind="automatic", module="lean_adapters", moment="weights", precisions=("fp16", "bf16"),
        under_deepspeed="not applied", exact="yes",
    ),
    Switch(
        "lean prediction",
        "in prediction, linear layers whose files are in 16 bits are kept so",
        kind="automatic", module="lean_adapters:apply_in_prediction", moment="weights",
        only_in="prediction", precisions=("fp16", "bf16"), under_deepspeed="not applied",
        exact="yes",
    ),
)  # fmt: skip
