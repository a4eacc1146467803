"""Rows applied to placed, equal weights: they split, fuse, compile and shard."""

from __future__ import annotations

from rapidformer.config.effect import Effect
from rapidformer.config.row import (
    AUTO,
    Implication,
    Question,
    Rule,
    Switch,
    register,
)
from rapidformer.config.rows.whole import (
    LEARNED_TOKENS,
    NEW_DROPOUT,
    SHARD_INSTEAD,
    not_with_images,
)

_ZERO_STAGES = {
    "zero_1_memory_optimization": 1, "zero_2_memory_optimization": 2,
    "zero_3_memory_optimization": 3, "fsdp_memory_optimization": 3,
}  # fmt: skip
_NO_STAGES = Rule("pipeline", "use --zero-3-memory-optimization instead of pipeline stages")

PLACED = register(
    Switch(
        "synchronised batch norm", "BatchNorm takes its statistics over the rows of all ranks",
        kind="automatic", module="batch_norm", only_in="training", is_needed=True,
    ),
    Switch(
        "grouped experts",
        "transformers' mixtures of experts run in 16 bits, and compiled as one graph",
        kind="automatic", module="grouped_experts", devices=("cpu", "cuda"),
        needs=(Rule("compilation"), Rule("precision")),
        excludes=(Rule("tensor parallelism", "its plans split experts another way"),),
        exact="up to rounding",
    ),
    # Everything below sees the split layers.
    Switch(
        "tensor parallelism", turned_on_by=("tensor_model_parallel_size",),
        module="tensor.parallel", excludes_adapters=LEARNED_TOKENS, exact=f"to 3e-6{NEW_DROPOUT}",
        excludes=(not_with_images(f"vision towers have no plan to split them. {SHARD_INSTEAD}"),),
        effect=Effect(divides="layers"),
    ),
    Switch(
        "sequence parallelism", "split the tokens between split layers too",
        turned_on_by=("sequence_parallel",), module="tensor.sequence",
        needs=(Rule("tensor parallelism"),), exact=f"to 3e-6{NEW_DROPOUT}",
        effect=Effect(divides="stream"),
    ),
    Switch(
        "loss over a split vocabulary",
        "compute the loss from logits that stay split over the ranks", kind="automatic",
        module="tensor.vocabulary_loss", needs=(Rule("tensor parallelism"),), exact="to 3e-6",
    ),
    # Before unpadding, which pads rows around this attention.
    Switch(
        "sliced heads",
        "Falcon's keys and values are taken by slices, for which the host does not wait",
        kind="always", module="sliced_heads", only_in="training",
        devices=("cuda",), exact="yes",
    ),
    # Before everything that replaces a model's sdpa attention by its own.
    Switch(
        "bias layout", "a relative position bias is laid out as fused attention needs it",
        kind="always", module="attention.kernel_order:lay_out_biases",
        gain="T5-3B with --compile on an H200: 28.0 instead of 23.1 samples/s, 62.7 instead of "
        "88.2 GiB",
        exact="up to rounding: fused kernels sum in a different order",
    ),
    Switch(
        "disentangled attention",
        "DeBERTa's scores of relative positions are a bias of fused attention, and not gathered",
        kind="automatic", module="attention.disentangled",
        needs=(Rule("attention", setting="attention", values=("auto",)),),
        excludes=(Rule("context parallelism", "it splits the tokens of a row"),),
        exact=f"up to rounding: scores are summed in a different order{NEW_DROPOUT}",
    ),
    Switch(
        "own attention code",
        "scores in a model's own code (GPT-Neo, Bloom) are left to fused attention",
        kind="automatic", module="attention.own_code.modules:apply", devices=("cuda",),
        needs=(Rule("attention", setting="attention", values=("auto",)),),
        excludes=(Rule("context parallelism", "it splits the tokens of a row"),),
        exact=f"up to rounding: scores are summed in a different order{NEW_DROPOUT}",
    ),
    Switch(
        "attention",
        turned_on_by=("attention",), off={"attention": "sdpa"}, module="attention.kernel_order",
        excludes=(
            *(
                Rule(setting="attention", values=(kernel,), devices=("cpu",),
                     reason="it runs on GPUs, and this run is on CPU")
                for kernel in ("cudnn", "flash")
            ),
            *(
                Rule(setting="attention", values=(kernel,), precisions=("fp32",),
                     reason="it computes in 16 bits, and this run is in fp32 (--mixed-precision "
                     "turns that on)")
                for kernel in ("cudnn", "flash")
            ),
            Rule(setting="attention", values=("flex",), devices=("cpu",),
                 reason="FlexAttention has no backward pass on CPUs"),
        ),
        exact=f"up to rounding: kernels sum in a different order{NEW_DROPOUT}",
        gain="T5-3B with --compile on an H200, our kernel for the learned bias and our AdamW: 34.8 "
        "instead of 28.3 samples/s",
    ),
    Switch(
        "varied lengths", "cuDNN does not get lengths for which it would prepare a new plan",
        kind="automatic", devices=("cuda",), precisions=("fp16", "bf16"),
        needs=(Rule("attention", setting="attention", values=("auto",)),),
        exact="up to rounding: kernels sum in a different order",
    ),
    Switch(
        "learned bias kernel", "attention with a learned bias runs in a kernel of our own",
        kind="automatic", devices=("cuda",), precisions=("fp16", "bf16"),
        needs=(Rule("attention", setting="attention", values=("auto",)),),
        exact="up to rounding: kernels sum in a different order",
    ),
    Switch(
        "fused loss",
        turned_on_by=("fused_loss",), off={"fused_loss": "off"}, module="fused_loss.fused_loss",
        gain="Qwen3 0.6B on an H200, 4 rows of 2048 tokens: 28.9 instead of 41.6 GiB",
    ),
    # Before compilation, which fuses the rounding into neighbouring kernels.
    Switch(
        "fp8", turned_on_by=("fp8",), module="fp8.layers",
        excludes=(
            Rule("tensor parallelism", "layers are converted whole; use "
                 "--zero-3-memory-optimization instead of split layers"),
            *(
                Rule("precision", "everything around its products is in bf16. Use "
                     "--mixed-precision bf16", setting=setting, values=(value,))
                for setting, value in (("mixed_precision", "fp16"), ("fp16", True))
            ),
            Rule("pipeline", "use 1f1b or interleaved. (Zero-bubble computes the gradients of "
                 "inputs and weights separately; an fp8 layer computes both at once.)",
                 setting="pipeline_schedule", values=("zero-bubble",)),
        ),
        # A GPU's capability is checked where the run starts (fp8/layers.py).
        implies=(Implication("fp8", "mixed_precision", "bf16", unless=("fp16",)),),
        verification="left out", why="fp8 changes the numbers by design; both runs are in fp32",
        exact="no: it trades precision for speed",
        gain="Llama 1B with --compile on an H200: 74.1k instead of 60.9k tokens/s",
        effect=Effect(in_8_bits=True),
    ),
    # Before compilation, so that a compiled block is recomputed as compiled.
    Switch(
        "recompute", turned_on_by=("checkpoint_activations", "recompute_granularity"),
        options=("recompute_interval",), module="recompute.blocks",
        excludes_adapters={
            "PREFIX_TUNING": "a recomputed block has no cache, which holds the learned keys and "
            "values. Use LoRA (--lora-rank), or leave one of them out"
        },
        implies=(
            Implication("recompute_granularity", "checkpoint_activations", True),
            Implication("checkpoint_activations", "recompute_granularity", "full"),
        ),
        exact="yes, dropout included",
        effect=Effect(keeps={"full": "inputs", "selective": "products"}),
    ),
    Switch(
        "compilation", turned_on_by=("compile", "onnx_runtime_training"),
        options=("compile_backend",), module="compile.compilation",
        excludes=(
            Rule(reason="on a CPU, nothing is compiled, since steps were slower (BERT of 6 "
                 "layers: 812 instead of 710 ms per step). --compile-backend inductor compiles "
                 "all the same",
                 setting="compile_backend", values=(AUTO,), devices=("cpu",),
                 if_asked="warned of"),
            Rule("pipeline", "use 1f1b or interleaved. (Zero-bubble computes the gradients of "
                 "inputs and weights separately; compiled blocks compute both at once.)",
                 setting="pipeline_schedule", values=("zero-bubble",)),
        ),
        verified_with={"compile_backend": "inductor"},  # on a CPU, too
        implies=(Implication("onnx_runtime_training", "compile", True),),
        exact=f"up to rounding: fused kernels sum in a different order{NEW_DROPOUT}",
        gain="GPT-2 on an H200: 476.3k instead of 242.1k tokens/s, 9.5 instead of 27.3 GiB",
        times={"cuda": 1.97}, pays_from=1000,
        effect=Effect(keeps={True: "compiled"}),
    ),
    Switch(
        "merged linear layers",
        "compiled blocks of models that are small for their GPU multiply layers with one "
        "input at once",
        kind="automatic", devices=("cuda",), precisions=("fp16", "bf16"),
        needs=(Rule("compilation"),), exact="up to rounding",
        gain="BERT-base with --compile on an H200, batch 16: 4.09 instead of 4.80 ms per replay",
    ),
    Switch(
        "hashed dropout", "compiled blocks draw dropout by a hash instead of Philox",
        kind="automatic", devices=("cuda",), needs=(Rule("compilation"),),
        exact="dropout only in distribution",
        gain="a block of GPT-2 on an H200: 4.264 instead of 4.389 ms",
    ),
    # Around both: for a recomputed block, only its inputs are kept and sent to the host.
    Switch(
        "activation offload", turned_on_by=("activation_offload",), module="activation_offload",
        devices=("cuda",), is_idle_elsewhere=True, exact="yes, dropout included",
        effect=Effect(on_host=("activations",)),
    ),
    # Outside all of these: tokens are split before the first block and joined after the last.
    Switch(
        "context parallelism", turned_on_by=("context_parallel_size",), module="context.parallel",
        excludes=(
            _NO_STAGES,
            not_with_images(f"ranks would share the tokens of an image. {SHARD_INSTEAD}"),
        ),
        excludes_adapters=LEARNED_TOKENS, exact=f"to 2e-6{NEW_DROPOUT}",
        effect=Effect(divides="tokens"),
    ),
    # Before padding is removed: these layers have a way of their own to do without it.
    Switch(
        "scans", "layers without attention scan their tokens by products of chunks",
        kind="always", module="scans.modules", exact="up to rounding",
        gain="Falcon-H1's layer on an H200, 8 rows of 1,000 tokens: 4.8 ms and 0.9 GiB instead of "
        "172 ms and 49 GiB",
    ),
    # Outside context parallelism: the ranks share rows that lie end to end.
    Switch(
        "dynamic shape",
        turned_on_by=("dynamic_shape",), off={"dynamic_shape": "off"}, module="unpad.unpadding",
        exact=f"to 1e-6{NEW_DROPOUT}", devices=("cpu", "cuda"),
        excludes=(
            *(
                Rule(name, f"{why}. Leave out --dynamic-shape")
                for name, why in {
                    "expert parallelism": "it has not been tried together",
                    "DeepSpeed": "it has not been tried together",
                }.items()
            ),
            Rule("compilation", "on a GPU, compiled blocks without padding need flash attention, "
                 "which works in 16 bits only. Add --mixed-precision, or leave out --dynamic-shape",
                 devices=("cuda",), precisions=("fp32",)),
            Rule("compilation", "it has not been tried together on a GPU. Leave out "
                 "--dynamic-shape", beside="context parallelism", devices=("cuda",)),
            Rule("pipeline", "in prediction, nothing repeats a call that passes from stage to "
                 "stage", only_in="prediction", if_asked="left off"),
            not_with_images("images have their places in padded rows. Leave out --dynamic-shape"),
        ),
        gain="a BERT of 6 layers on 2 CPU cores, rows of 20 to 99 tokens, batch 64: 1851 instead "
        "of 1196 tokens/s; BART-large on an H200, rows of 40 to 400 tokens: 39 to 50 instead of "
        "75 to 95 ms per step",
        times={"cpu": 1.55, "cuda": 1.91},
    ),
    # The loader's: a step takes the same samples, divided into other micro-batches.
    Switch(
        "token budget", turned_on_by=("tokens_per_micro_batch",),
        excludes=(
            Rule("pipeline", "stages exchange micro-batches of one size; use --micro-batch-size"),
            Rule("DeepSpeed", "it expects equally many micro-batches in every step; use "
                 "--zero-1-memory-optimization, -2- or -3- instead of DeepSpeed"),
        ),
        exact=f"to 1e-6{NEW_DROPOUT}",
    ),
    # Before sharding, which shards each rank's experts further.
    Switch(
        "expert parallelism",
        turned_on_by=("expert_model_parallel_size",), module="expert.parallel",
        excludes=(
            Rule("tensor parallelism", "experts need different tokens on each rank, split layers "
                 "the same ones. Most of a mixture's weights are experts: use "
                 "--expert-model-parallel-size, and --zero-3-memory-optimization for the rest"),
            _NO_STAGES,
        ),
        effect=Effect(divides="experts"),
    ),
    # Sharding must see the final blocks.
    Switch(
        "ZeRO", "shard optimizer state, gradients and weights over the data-parallel ranks",
        turned_on_by=tuple(_ZERO_STAGES), kinds=_ZERO_STAGES, module="sharding.zero",
        under_deepspeed="done by DeepSpeed",
        needs=(Rule(among_replicas=True), Rule("CPU offload")),
        question=Question(
            flag="zero",
            text="Shard the training state over the ranks? (no, 1, 2, 3: the ZeRO stage)",
            answers={str(stage): {name: True} for name, stage in list(_ZERO_STAGES.items())[:3]},
        ),
        gain="a small Llama on 2 CPU processes: 99.9, 99.1 and 98.1 % of the speed of hand-written "
        "fully_shard, for stages 1, 2 and 3",
        effect=Effect(shards_from={"optimizer": 1, "gradients": 2, "weights": 3}),
    ),
    Switch(
        "hybrid sharding", turned_on_by=("hybrid_sharding_size",),
        needs=(
            Rule("ZeRO", "it sets how many ranks shard the state; without ZeRO nothing is sharded"),
            Rule("CPU offload"),
        ),
        is_refused_alone=True,
    ),
    Switch(
        "CPU offload", "keep weights, gradients and optimizer state in host memory",
        turned_on_by=("cpu_offload",), under_deepspeed="done by DeepSpeed",
        # One CPU rank has everything in host memory anyway.
        needs=(Rule(among_replicas=True), Rule(devices=("cuda",))),
        implies=(
            # Offloaded weights must be fetched block by block, like ZeRO-3's.
            Implication("cpu_offload", "zero_3_memory_optimization", True,
                        unless=(*_ZERO_STAGES, "deepspeed")),
        ),
        effect=Effect(on_host=("weights", "gradients", "optimizer")),
    ),
)  # fmt: skip
