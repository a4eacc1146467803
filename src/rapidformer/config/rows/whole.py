"""Rows applied to the model as built, and to its weights before they are made equal.

The order is that of application: what the host answers, where blocks live, then weights.
"""

from __future__ import annotations

from rapidformer.config.row import Rule, Switch, register

_NEW_DROPOUT = "; dropout only in distribution"

_LEARNED_TOKENS = {
    "prompt": "its learned tokens are outside the layers. Use --zero-3-memory-optimization, or "
    "LoRA (--lora-rank)"
}

WHOLE = register(
    Switch(
        name="no cache in training",
        kind="always",
        does="models of transformers fill no key/value cache when a loss is computed",
        module="cache",
        moment="whole",
        is_for_training=True,
        exact="yes",
    ),
    Switch(
        name="host masks",
        kind="always",
        does="transformers' questions about padding and positions are answered from host memory",
        module="host_masks",
        moment="whole",
        is_for_training=True,
        exact="yes",
    ),
    Switch(
        name="adapted layers",
        kind="always",
        does="torch's fused encoder layer, which would bypass adapters, is not used",
        module="lean_adapters:apply_adapted_layers",
        moment="whole",
        is_needed=True,
        exact="yes",
    ),
    # Before the rest, so that no rank processes blocks that it will not keep.
    Switch(
        name="pipeline",
        turned_on_by=("pipeline_model_parallel_size",),
        options=("pipeline_schedule", "num_layers_per_virtual_pipeline_stage"),
        module="pipeline.pipeline",
        moment="whole",
        excludes_adapters=_LEARNED_TOKENS,
        exact=f"to 5e-6{_NEW_DROPOUT}",
    ),
    Switch(
        name="DeepSpeed",
        turned_on_by=("deepspeed",),
        module="deepspeed.strategy",
        moment="whole",
        excludes=(
            Rule(
                switch="pipeline",
                reason="use a pipeline with --zero-1-memory-optimization instead of DeepSpeed",
            ),
            Rule(
                switch="sequence parallelism",
                reason="use it with --tensor-model-parallel-size and without DeepSpeed",
            ),
            Rule(
                switch="context parallelism",
                reason="use --zero-3-memory-optimization instead of DeepSpeed",
            ),
            Rule(
                switch="expert parallelism",
                reason="use --zero-1-memory-optimization instead of DeepSpeed",
            ),
            Rule(
                switch="hybrid sharding",
                reason="set zero_optimization.zero_hpz_partition_size in its file instead",
            ),
            Rule(switch="fp8", reason="use --zero-3-memory-optimization instead of DeepSpeed"),
        ),
        verification="refused",
        why="verify cannot read the gradients that DeepSpeed keeps internally: verify the same "
        "stage with --zero-1-, --zero-2- or --zero-3-memory-optimization instead",
        exact="to 2e-6, unless its file asks for 16 bits",
    ),
    Switch(
        name="fp32 weights",
        kind="automatic",
        does="weights that are trained in mixed precision are kept in fp32",
        module="precision.autocast:keep_fp32_weights",
        moment="weights",
        precisions=("fp16", "bf16"),
        is_needed=True,
        exact="yes",
    ),
    # After it: frozen weights alone are rounded again.
    Switch(
        name="lean adapters",
        kind="automatic",
        does="frozen linear layers under adapters are kept in 16 bits, and inputs are cast once",
        module="lean_adapters",
        moment="weights",
        precisions=("fp16", "bf16"),
        under_deepspeed="not applied",
        exact="yes",
    ),
)
