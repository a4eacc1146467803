"""Rows applied when no parameter is replaced any more, and those of the optimizer."""

from __future__ import annotations

from rapidformer.config.row import (
    Implication,
    Question,
    Rule,
    Switch,
    not_with_images,
    register,
)

_SPLIT = ("tensor parallelism", "expert parallelism", "ZeRO", "CPU offload")
_COLLECTIVES = (
    "tensor parallelism", "pipeline", "context parallelism", "expert parallelism",
)  # fmt: skip
"""What exchanges something between ranks in every pass."""
_WHOLE_MATRICES = tuple(
    Rule(name, "it looks at whole matrices and cannot work on split ones. Use adam or sgd, or "
         "leave one of them out", among_ranks=name == "ZeRO")  # on one rank it has no effect
    for name in _SPLIT
)  # fmt: skip
_ADAM = Rule(setting="optimizer", values=("adam", "adamw"), reason="it stores the moments of Adam")
_NO_DEEPSPEED = Rule(
    "DeepSpeed", "it has its own optimizers. Use --zero-1-memory-optimization, -2- or -3- instead"
)

FINAL = register(
    # It hooks parameters, which must not be replaced after this.
    Switch(
        "data parallelism",
        "sum gradients over the ranks that have different rows, while the backward pass runs",
        kind="automatic", options=("data_parallel",), ranks="several", module="data_parallel",
        moment="final", under_deepspeed="done by DeepSpeed",
        gain="a small Llama on 2 CPU processes: 100.2 % of the speed of DistributedDataParallel",
    ),
    # Around everything: the whole model runs under autocast.
    Switch(
        "precision", turned_on_by=("mixed_precision", "fp16", "bf16"),
        kinds={"fp16": "fp16", "bf16": "bf16"}, module="precision.autocast", moment="final",
        implies=tuple(Implication(kind, "mixed_precision", kind) for kind in ("fp16", "bf16")),
        verification="left out",
        why="precision changes the numbers by design; both runs are in fp32",
        question=Question(
            flag="mixed_precision", text="Mixed precision? (no, fp16, bf16)",
            answers={kind: {"mixed_precision": kind} for kind in ("fp16", "bf16")},
        ),
        exact="no: it trades precision for speed",
    ),
    # Last of what a pass consists of: the passes are recorded with everything above in them.
    Switch(
        "CUDA graph", turned_on_by=("cuda_graph",), off={"cuda_graph": "off"},
        module="cuda_graph.permission", moment="final", is_for_training=True,
        under_deepspeed="not applied", devices=("cuda",), precisions=("fp32", "bf16"),
        excludes=(
            *(
                Rule(name, f"{why}. Leave out --cuda-graph")
                for name, why in {
                    **dict.fromkeys(_COLLECTIVES, "its collectives cannot be replayed yet"),
                    "ZeRO": "its collectives and host copies cannot be replayed yet",
                    "CPU offload": "its collectives and host copies cannot be replayed yet",
                    "DeepSpeed": "it performs its updates itself",
                    "activation offload": "copies to the host cannot be replayed yet",
                }.items()
            ),
            not_with_images("every batch has pixels of another shape. Leave out --cuda-graph"),
        ),
        gain="BERT-base on an H200, 20 to 99 tokens, batch 16: 9.3 instead of 51.4 ms per step",
        exact="yes; padded batches to 1e-6, their dropout only in distribution",
    ),
    Switch(
        "loss scaling", "scale an fp16 loss, so that small gradients do not become zero",
        kind="automatic",
        options=(
            "initial_loss_scale", "loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis",
        ),
        precisions=("fp16",),
        needs=(Rule("precision", setting="mixed_precision", values=("fp16", "auto")),),
        verification="left out", why="both runs are in fp32", exact="no: it belongs to fp16",
    ),
    Switch(
        "small tables", "the gradient of an embedding table of a few rows is a matrix product",
        kind="always", module="small_tables", moment="final", is_for_training=True,
        devices=("cuda",), exact="up to rounding",
        gain="BERT's token types on an H200, 16 short rows: 0.1 of 4.8 ms",
    ),
    Switch(
        "sliced heads",
        "Falcon's keys and values are taken by slices, for which the host does not wait",
        kind="always", module="sliced_heads", moment="final", is_for_training=True,
        devices=("cuda",), exact="yes",
    ),
    # Its gates go outside everything applied so far.
    Switch(
        "stage gates", "a block of another pipeline stage passes on what it gets",
        kind="always", module="pipeline.pipeline:attach", moment="final", is_needed=True,
        needs=(Rule("pipeline"),),
    ),
    Switch(
        "gradient penalties", "a gradient of a gradient that would depend on the ranks is refused",
        kind="always", module="double_backward", moment="final", is_for_training=True, exact="yes",
    ),
    Switch(
        "retired parameters",
        "parameters collected before compose() that were replaced refuse to be used", kind="always",
        module="split.absent", moment="final", is_for_training=True, is_needed=True, exact="yes",
    ),
    Switch(
        "split weights in own code",
        "hooks, item assignments and autograd functions of a script get whole tensors",
        kind="always", module="split.own_code", moment="final", is_for_training=True,
        is_needed=True, exact="yes",
    ),
    Switch(
        "dropout seeds",
        "replicas draw different dropout masks, ranks that share a layer the same ones",
        kind="always", module="dropout_seeds", moment="final", is_for_training=True, is_needed=True,
        exact="dropout only in distribution",
    ),
    # ---- the optimizer's ----
    Switch(
        "update clock",
        "optimizer and schedule step when an update is due, with the global batch's gradients",
        kind="always", is_for_training=True, is_needed=True, moment="final", exact="yes",
    ),
    Switch(
        "clipping in the step",
        "a fused optimizer clips while it updates, instead of in a pass before",
        kind="automatic", is_for_training=True, devices=("cuda",), moment="final",
        under_deepspeed="done by DeepSpeed",
        excludes=(Rule("CPU offload", "its gradients are in host memory"),),
        exact="up to the last bit",
    ),
    Switch(
        "AdamW kernel",
        "AdamW of the settings updates all parameters in one kernel of our own (Triton)",
        kind="automatic", is_for_training=True, devices=("cuda",), moment="final",
        under_deepspeed="done by DeepSpeed", exact="up to rounding",
        gain="1.2 billion parameters on an H200, clipping included: 8.15 instead of 11.38 ms",
    ),
    Switch(
        "bf16 moments", "keep Adam's moments in bf16, which takes half the memory",
        turned_on_by=("optimizer_state_dtype",), on_values=("bf16",), needs=(_ADAM,),
        is_refused_alone=True, moment="final", excludes=(_NO_DEEPSPEED,), verification="left out",
        why="it rounds the moments; both runs keep them in fp32",
        exact="no: it trades precision for memory",
    ),
    Switch(
        "int8 moments", "keep Adam's moments in 8 bits, which takes a quarter of the memory",
        turned_on_by=("optimizer_state_dtype",), on_values=("int8",), needs=(_ADAM,),
        is_refused_alone=True, package="torchao", moment="final",
        excludes=(
            _NO_DEEPSPEED,
            *(
                Rule(name, "moments are quantized in blocks, which cannot be split. Use "
                     "--optimizer-state-dtype bf16, or leave one of them out")
                for name in _SPLIT
            ),
        ),
        verification="left out", why="it rounds the moments; both runs keep them in fp32",
        exact="no: it trades precision for memory",
    ),
    Switch(
        "Muon", "update matrices with Muon, everything else with AdamW",
        turned_on_by=("optimizer",), on_values=("muon",), off={"optimizer": "sgd"}, moment="final",
        excludes=_WHOLE_MATRICES, verification="left out",
        why="it computes in bf16; both runs use SGD", exact="a choice of optimizer",
    ),
    Switch(
        "Adafactor", "update with Adafactor, which stores rows and columns of moments only",
        turned_on_by=("optimizer",), on_values=("adafactor",), moment="final",
        excludes=_WHOLE_MATRICES, verification="kept", exact="a choice of optimizer",
    ),
    Switch(
        "quantized base", "keep the frozen weights under adapters in 8 or 4 bits",
        turned_on_by=("quantize_base",), moment="final",
        excludes=tuple(
            Rule(name, "packed weights cannot be split. Use data parallelism alone, or leave one "
                 "of them out")
            for name in (*_SPLIT, "pipeline", "DeepSpeed")
        ),
        verification="kept", exact="a choice of precision",
    ),
)  # fmt: skip
