"""Rows applied when no parameter is replaced any more, and those of the optimizer."""

from __future__ import annotations

from rapidformer.config.effect import Effect
from rapidformer.config.row import (
    Implication,
    Question,
    Rule,
    Switch,
    register,
)
from rapidformer.config.rows.whole import not_with_images

_SPLIT = ("tensor parallelism", "expert parallelism", "ZeRO", "CPU offload")
_COLLECTIVES = (
    "tensor parallelism", "pipeline", "context parallelism", "expert parallelism",
)  # fmt: skip
"""What exchanges something between ranks in every pass."""
_NOT_REPLAYED_FORWARD = (
    *(Rule(name, "its collectives cannot be replayed yet") for name in _COLLECTIVES),
    *(Rule(name, "weights are not on the device as a whole") for name in ("ZeRO", "CPU offload")),
)
# Its own row is one of training.
_GRAPHS = Rule("", setting="cuda_graph", values=("auto", "on"))
_WHOLE_MATRICES = tuple(
    Rule(name, "it looks at whole matrices and cannot work on split ones. Use adam or sgd, or "
         "leave one of them out")
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
        kind="automatic", options=("data_parallel",), module="data_parallel",
        moment="final", under_deepspeed="done by DeepSpeed",
        needs=(Rule(among_replicas=True),), excludes=(Rule("ZeRO", "it sums them itself"),),
        gain="a small Llama on 2 CPU processes: 100.2 % of the speed of DistributedDataParallel",
        effect=Effect(copies_gradients="at the end"),
    ),
    # Around everything: the whole model runs under autocast.
    Switch(
        "precision", turned_on_by=("mixed_precision", "fp16", "bf16"),
        kinds={"fp16": "fp16", "bf16": "bf16"}, module="precision.autocast", moment="final",
        excludes=(
            Rule(precisions=("fp32",), if_asked="left off",
                 reason="this processor has none in 16 bits, so the run stays in fp32"),
        ),
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
        module="cuda_graph.permission", moment="final", only_in="training",
        devices=("cuda",), precisions=("fp32", "bf16"),
        excludes=(
            *(
                Rule(name, f"{why}. Leave out --cuda-graph")
                for name, why in {
                    **dict.fromkeys(_COLLECTIVES, "its collectives cannot be replayed yet"),
                    "CPU offload": "its collectives and host copies cannot be replayed yet",
                    "DeepSpeed": "it performs its updates itself",
                    "activation offload": "copies to the host cannot be replayed yet",
                }.items()
            ),
            not_with_images("every batch has pixels of another shape. Leave out --cuda-graph"),
        ),
        gain="BERT-base on an H200, 20 to 99 tokens, batch 16: 9.3 instead of 51.4 ms per step",
        times={"cuda": 5.5},
        exact="yes; accumulated steps of ZeRO-2 and -3 up to rounding, padded batches to 1e-6, "
        "their dropout only in distribution",
        # Measured on an H200: a second workspace of each library, and what a proof compares.
        effect=Effect(copies_gradients="always", takes=3 * 10**8, most_work=5e13),
    ),
    # Part of it: whether pieces are ever needed shows while the run goes on.
    Switch(
        "graphs in pieces",
        "the model or its blocks are replayed if a whole step cannot be, because of your own code",
        kind="automatic", moment="final", only_in="training", devices=("cuda",),
        under_deepspeed="not applied", needs=(Rule("CUDA graph"),),
        excludes=(
            Rule("recompute", "a replayed block has kept its activations"),
            Rule(reason="ranks exchange gradients during the backward pass", among_replicas=True),
        ),
        exact="up to rounding",
    ),
    Switch(
        "forward graphs",
        "the model or its blocks are replayed as CUDA graphs in prediction",
        kind="automatic", module="cuda_graph.forward_graphs", moment="final", devices=("cuda",),
        only_in="prediction", excludes=_NOT_REPLAYED_FORWARD,
        needs=(_GRAPHS,), exact="up to rounding",
    ),
    Switch(
        "decoding graph",
        "tokens are generated by a CUDA graph, with a cache of one size",
        kind="automatic", module="cuda_graph.decoding", moment="final", devices=("cuda",),
        under_deepspeed="not applied", excludes=_NOT_REPLAYED_FORWARD,
        needs=(_GRAPHS,), exact="up to rounding",
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
        kind="always", module="small_tables", moment="final", only_in="training",
        devices=("cuda",), exact="up to rounding",
        gain="BERT's token types on an H200, 16 short rows: 0.1 of 4.8 ms",
    ),
    Switch(
        "wide convolutions", "a convolution of many steps in groups is a product of transforms",
        kind="always", module="wide_convolutions", moment="final", devices=("cuda",),
        precisions=("bf16", "fp16"), exact="up to rounding",
        gain="Wav2Vec2's positions on an H200, 16 recordings of 10 s: 2.2 instead of 15.1 ms",
    ),
    # Its gates go outside everything applied so far.
    Switch(
        "stage gates", "a block of another pipeline stage passes on what it gets",
        kind="always", module="pipeline.pipeline:attach", moment="final", is_needed=True,
        needs=(Rule("pipeline"),),
    ),
    Switch(
        "gradient penalties", "a gradient of a gradient that would depend on the ranks is refused",
        kind="always", module="double_backward", moment="final", only_in="training", exact="yes",
    ),
    Switch(
        "retired parameters",
        "parameters collected before compose() that were replaced refuse to be used", kind="always",
        module="split.absent", moment="final", only_in="training", is_needed=True, exact="yes",
    ),
    Switch(
        "split weights in own code",
        "hooks, item assignments and autograd functions of a script get whole tensors",
        kind="always", module="split.own_code", moment="final", only_in="training",
        is_needed=True, exact="yes",
    ),
    Switch(
        "dropout seeds",
        "replicas draw different dropout masks, ranks that share a layer the same ones",
        kind="always", module="dropout_seeds", moment="final", only_in="training", is_needed=True,
        exact="dropout only in distribution",
    ),
    # ---- the optimizer's ----
    Switch(
        "update clock",
        "optimizer and schedule step when an update is due, with the global batch's gradients",
        kind="always", only_in="training", is_needed=True, moment="final", exact="yes",
    ),
    Switch(
        "clipping in the step",
        "a fused optimizer clips while it updates, instead of in a pass before",
        kind="automatic", only_in="training", devices=("cuda",), moment="final",
        under_deepspeed="done by DeepSpeed",
        excludes=(Rule("CPU offload", "its gradients are in host memory"),),
        exact="up to the last bit",
    ),
    Switch(
        "AdamW kernel",
        "AdamW of the settings updates all parameters in one kernel of our own (Triton)",
        kind="automatic", only_in="training", devices=("cuda",), moment="final",
        under_deepspeed="done by DeepSpeed", exact="up to rounding",
        needs=(
            Rule(setting="optimizer", values=("adam", "adamw")),
            Rule("Muon"),  # which leaves all but matrices to AdamW
        ),
        excludes=(
            Rule("int8 moments", "they have an AdamW of their own"),
            Rule("CPU offload", "it updates weights on the GPU"),
        ),
        gain="1.2 billion parameters on an H200, clipping included: 8.15 instead of 11.38 ms",
    ),
    Switch(
        "bf16 moments", "keep Adam's moments in bf16, which takes half the memory",
        turned_on_by=("optimizer_state_dtype",), on_values=("bf16",), needs=(_ADAM,),
        is_refused_alone=True, moment="final", excludes=(_NO_DEEPSPEED,), verification="left out",
        why="it rounds the moments; both runs keep them in fp32",
        exact="no: it trades precision for memory", effect=Effect(moments=4.0),
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
        effect=Effect(moments=2 * (1 + 4 / 256)),  # 256 of them have an fp32 scale
    ),
    Switch(
        "Muon", "update matrices with Muon, everything else with AdamW",
        turned_on_by=("optimizer",), on_values=("muon",), off={"optimizer": "sgd"}, moment="final",
        excludes=_WHOLE_MATRICES, verification="left out",
        why="it computes in bf16; both runs use SGD", exact="a choice of optimizer",
        effect=Effect(moments=4.0),
    ),
    Switch(
        "Adafactor", "update with Adafactor, which stores rows and columns of moments only",
        turned_on_by=("optimizer",), on_values=("adafactor",), moment="final",
        excludes=_WHOLE_MATRICES, verification="kept", exact="a choice of optimizer",
        effect=Effect(moments=0.0),
    ),
    Switch(
        "quantized base", "keep the frozen weights under adapters in 8 or 4 bits",
        turned_on_by=("quantize_base",), moment="final",
        needs=(
            Rule(setting="lora_rank", reason="only adapters can be trained on quantized weights"),
            Rule(setting="peft_config"),
        ),
        is_refused_alone=True,
        excludes=(
            *(
                Rule(name, "packed weights cannot be split. Use data parallelism alone, or leave "
                     "one of them out")
                for name in (*_SPLIT, "pipeline", "DeepSpeed")
            ),
            Rule(setting="from_scratch", values=(True,),
                 reason="only the weights of a pretrained model can be quantized"),
            Rule(setting="quantize_base", values=("8bit",), devices=("cpu",),
                 reason="on a CPU, bitsandbytes trains with such weights but cannot save them. "
                 "Use --quantize-base 4bit"),
        ),
        verification="kept", exact="a choice of precision",
    ),
)  # fmt: skip
