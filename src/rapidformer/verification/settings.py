"""The settings of a verified run: the user's, made small and exact, with nothing written to disk.

One run has the switches, the other is one process without them; ``change_settings`` derives both
from the same settings, on every rank. Sizes are reduced *before* the switches are turned off, or
the two runs would have different models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, lcm
from pathlib import Path
from typing import Any, Literal

from rapidformer.config import Settings
from rapidformer.config.row import AUTO
from rapidformer.config.sections import LaunchArguments, ParallelArguments
from rapidformer.config.switches import SWITCHES, Switch, to_flag
from rapidformer.hub import quiet_transformers
from rapidformer.models.location import is_model_folder

SOURCE = "rapidformer verify"
Kind = Literal["switched", "whole", "pieces", "disturbed", "shaken"]
# With a smaller epsilon, Adam turns round-off in gradients near zero into full steps.
SMALLEST_EPSILON = 1e-6
_MICRO_BATCH, _SEQUENCE, _STRIDE, _HEAD, _ROWS = 4, 128, 32, 8, 256
_LEFT_OUT = [switch for switch in SWITCHES if switch.verification == "left out"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of a verification, as described to each of its ranks."""

    folder: str
    kind: Kind
    """switched: as asked for; whole: one process, each global batch in one piece; pieces: one
    process, the same micro-batches; disturbed: like whole, with other random numbers; shaken: like
    whole, from weights that differ by round-off.
    """
    updates: int
    processes: int
    """Of the switched run."""
    is_full_size: bool = False
    is_narrow: bool = True
    """Whether a model of transformers gets narrower layers, not only fewer (``can_narrow``)."""
    global_batch_size: int | None = None
    """As found in the switched run."""
    micro_batch_size: int | None = None
    """Of the one-process run."""

    def get_path(self, rank: int) -> Path:
        return Path(self.folder) / f"{self.kind}_{rank}.npz"


def count_processes(args: Settings) -> int:
    """The number asked for on one node; otherwise the fewest that the switches need."""
    if has_own_count(args):
        assert args.nproc_per_node is not None
        return args.nproc_per_node
    context, experts = max(args.context_parallel_size, 1), max(args.expert_model_parallel_size, 1)
    replicas = lcm(context, experts)
    if (args.data_parallel or 1) > 1:
        replicas = lcm(replicas, 2 * context)
    # --cpu-offload alone implies ZeRO-3, and one rank would have nothing to shard.
    if args.zero_stage or args.cpu_offload or args.deepspeed is not None:
        copies = 2 * (args.hybrid_sharding_size or 0)
        replicas = lcm(replicas, copies) if copies > 0 else max(replicas, 2)
    tensor, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    return replicas * max(tensor, 1) * max(stages, 1)


def has_own_count(args: LaunchArguments) -> bool:
    """Whether the run is verified with its own number of ranks."""
    return args.nproc_per_node is not None and args.hostfile is None and args.nnodes in (None, 1)


def list_switches(args: Settings, processes: int) -> list[str]:
    """The settings that only the switched run has; empty: there is nothing to verify."""
    switches = [
        _describe(args, name)
        for switch in SWITCHES
        if switch.verification == "off" and switch.turned_on_by and switch.is_on(args)
        for name in switch.list_given(args)
    ]
    if _count_accumulation(args, processes) > 1:
        switches.append("gradient accumulation")
    if (replicas := _count_replicas(args, processes)) > 1:
        switches.append(f"data parallelism over {replicas}")
    return switches


def list_left_out(args: Settings) -> list[str]:
    """Settings given by the user that verification leaves out, each with the reason."""
    left_out = [
        f"{_describe(args, name)}: {switch.why}"
        for switch in _LEFT_OUT
        for name in switch.list_given(args)
    ]
    if args.optimizer in ("adam", "adamw") and args.adam_eps < SMALLEST_EPSILON:
        left_out.append(
            f"--adam-eps {args.adam_eps:g}: it turns round-off into full steps; both runs use "
            f"{SMALLEST_EPSILON:g}"
        )
    if args.lr_warmup_iters or args.lr_warmup_fraction or args.lr_warmup_samples:
        left_out.append("the learning-rate warmup: its first steps would change nothing")
    return left_out


def change_settings(args: Settings, job: Job) -> Settings:
    """The settings of one run of the verification."""
    args = _make_plain(args, job)
    if not job.is_full_size:
        args = _reduce(args, job)
    return args if job.kind == "switched" else _take_switches_away(args, job)


def _make_plain(args: Settings, job: Job) -> Settings:
    """Exact arithmetic, no randomness, a few updates; nothing is loaded or saved."""
    args = _turn_off(args.keep_nothing(SOURCE), _LEFT_OUT).replace(
        SOURCE,
        hidden_dropout=0.0, attention_dropout=0.0,
        adam_eps=max(args.adam_eps, SMALLEST_EPSILON),
        lr_warmup_iters=0, lr_warmup_fraction=None, lr_warmup_samples=0,
        # So steep that an update with another one's rate shows, and never down to zero.
        lr_decay_style="linear", lr_decay_iters=2 * job.updates, lr_decay_samples=None, min_lr=0.0,
        rampup_batch_size=None,
        data_parallel=None,  # it only checks the number of ranks, which differs here
        tensorboard_dir=None, report_to=None, exit_interval=None, exit_duration_in_mins=None,
        progress=False, log_level="warning", num_workers=0,
        data_cache_path=args.data_cache_path or f"{job.folder}/index-cache",
    )  # fmt: skip
    for switch in SWITCHES:
        if switch.is_on(args):
            left = {n: v for n, v in switch.verified_with.items() if getattr(args, n) == AUTO}
            args = args.replace(SOURCE, **left)
    if args.load is not None:
        folder = Path(args.load).expanduser()
        if folder.is_dir() and not is_model_folder(folder):
            args = args.replace(SOURCE, load=None, finetune=False)
    if args.user_script is None:
        return args.replace(
            SOURCE,
            train_iters=job.updates, epochs=None, train_samples=None, train_tokens=None,
            eval_iters=0, max_eval_samples=_ROWS,
            # The user's own first rows: enough for a few updates, and for every class to occur.
            max_train_samples=None
            if args.streaming
            else min(args.max_train_samples or _ROWS, _ROWS),
        )  # fmt: skip
    if args.train_iters or args.train_samples or args.train_tokens:
        # So that a script does not prepare data for the whole run.
        return args.replace(
            SOURCE, train_iters=job.updates, train_samples=None, train_tokens=None, eval_iters=0
        )
    return args


def _reduce(args: Settings, job: Job) -> Settings:
    if args.user_script is not None:
        reads_sizes = args.num_layers is not None and args.hidden_size is not None
        if not reads_sizes or args.pretrained_model_name_or_path is not None or args.load:
            return args  # the script's own model, which cannot be made smaller
    if _is_built_from_flags(args):
        return _reduce_batches(_reduce_flags(args), job)
    return _reduce_batches(_reduce_model(args, is_narrow=job.is_narrow), job)


def _is_built_from_flags(args: Settings) -> bool:
    return args.user_script is not None or args.model_type in ("gpt", "rapidformer_gpt")


def _reduce_flags(args: Settings) -> Settings:
    """Smaller sizes for a model built from flags: fewer layers, and as many but narrower heads."""
    if args.num_layers is None or args.hidden_size is None or args.num_attention_heads is None:
        return args  # what is missing is reported later
    hidden = min(args.hidden_size, _HEAD * args.num_attention_heads)
    layers = min(args.num_layers, max(_count_layers(args), args.moe_layer_freq))
    std = (args.init_method_std or 0.02) * (args.hidden_size / hidden) ** 0.5
    return args.replace(
        SOURCE,
        init_method_std=args.init_method_std if hidden == args.hidden_size else std,
        num_layers=args.num_layers if len(args.num_experts or [0]) > 1 else layers,
        hidden_size=hidden,
        ffn_hidden_size=None if args.ffn_hidden_size is None else 4 * hidden,
    )


def can_narrow(args: Settings, job: Job) -> bool:
    """Whether a model of transformers runs with narrower layers. Found out once, for all runs.

    The width of a Mamba layer must fit other sizes; some models cannot be called by tokens alone.
    """
    if job.is_full_size or _is_built_from_flags(args):
        return True
    args = _make_plain(args, job)
    narrow, shallow = (_reduce_model(args, is_narrow=is_narrow) for is_narrow in (True, False))
    return narrow == shallow or _can_run(narrow) or not _can_run(shallow)


def _reduce_model(args: Settings, *, is_narrow: bool) -> Settings:
    """A Hugging Face configuration with new weights, fewer layers and narrower heads."""
    from rapidformer.models.configuration import get_position_limit, get_size, load_config

    config = load_config(args)
    if args.seq_length is None:
        limit = get_position_limit(config) or _SEQUENCE
        args = args.replace(SOURCE, seq_length=min(limit, _SEQUENCE))
    names = ("num_layers", "hidden_size", "num_attention_heads")
    layers, hidden, heads = (get_size(config, name) for name in names)
    if not (isinstance(layers, int) and isinstance(hidden, int) and isinstance(heads, int)):
        return args
    least = _count_layers(args)
    fewer = min(layers, least * ceil(_count_first_layers(config) / least))
    narrow = min(hidden, _HEAD * heads)
    if (fewer, narrow) == (layers, hidden):
        return args
    shallow = args.replace(SOURCE, from_scratch=True, num_layers=fewer)
    if not is_narrow:
        return shallow
    return shallow.replace(
        SOURCE, hidden_size=narrow, num_attention_heads=heads, ffn_hidden_size=4 * narrow,
        # Narrow layers need larger weights to keep rows as distinct as before.
        init_method_std=getattr(config, "initializer_range", 0.02) * (hidden / narrow) ** 0.5,
    )  # fmt: skip


def _count_first_layers(config: Any) -> int:
    """The fewest layers from the first one on with each kind that the configuration names."""
    from rapidformer.models.towers import get_shared, get_text_config, list_layer_kinds

    networks = get_shared(get_text_config(config), "mlp_layer_types")
    lists = [list_layer_kinds(config), list(networks or [])]
    return max((1 + kinds.index(kind) for kinds in lists for kind in kinds), default=1)


def _can_run(args: Settings) -> bool:
    """Whether the settings' model can be called, if it reads text alone."""
    import torch
    from transformers import AutoModel

    from rapidformer.models.configuration import load_config
    from rapidformer.models.towers import reads_more_than_text

    config = load_config(args)
    if reads_more_than_text(config):
        return True
    tokens = torch.zeros(1, 4, dtype=torch.long)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet_transformers(None):
            model = AutoModel.from_config(config, trust_remote_code=args.trust_remote_code)
            targets = {"decoder_input_ids": tokens} if config.is_encoder_decoder else {}
            if model.main_input_name == "input_ids":
                model(input_ids=tokens, **targets)
    except Exception:  # a model's own code may raise anything
        return False
    return True


def _count_layers(args: ParallelArguments) -> int:
    """Two for every stage of the pipeline, virtual ones included."""
    stages = args.pipeline_model_parallel_size
    return 2 * stages * (args.num_layers_per_virtual_pipeline_stage or 1)


def _reduce_batches(args: Settings, job: Job) -> Settings:
    """Few, short rows: one process must take a whole global batch at once."""
    micro = min(args.micro_batch_size or _MICRO_BATCH, _MICRO_BATCH)
    rounds = min(_count_accumulation(args, job.processes), 2 * args.pipeline_model_parallel_size)
    return args.replace(
        SOURCE,
        micro_batch_size=micro,
        global_batch_size=micro * rounds * _count_replicas(args, job.processes),
        gradient_accumulation_steps=None,
        seq_length=None if args.seq_length is None else min(args.seq_length, _SEQUENCE),
        decoder_seq_length=min(args.decoder_seq_length or _SEQUENCE, _SEQUENCE),
        doc_stride=None if args.doc_stride is None else min(args.doc_stride, _STRIDE),
    )


def _count_replicas(args: ParallelArguments, processes: int) -> int:
    ranks_per_model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    return max(processes // (ranks_per_model * args.context_parallel_size), 1)


def _count_accumulation(args: Settings, processes: int) -> int:
    if args.gradient_accumulation_steps is not None:
        return args.gradient_accumulation_steps
    if args.global_batch_size is None or args.micro_batch_size is None:
        return 1
    unit = args.micro_batch_size * _count_replicas(args, processes)
    return max(args.global_batch_size // unit, 1)


def _take_switches_away(args: Settings, job: Job) -> Settings:
    """One process, all switches off, the same samples in every update."""
    return _turn_off(args, SWITCHES).replace(
        SOURCE,
        without=[switch.word for switch in SWITCHES if switch.has_word],
        nproc_per_node=None, nnodes=None, hostfile=None, gradient_accumulation_steps=None,
        micro_batch_size=job.micro_batch_size, global_batch_size=job.global_batch_size,
    )  # fmt: skip


def _turn_off(args: Settings, switches: Sequence[Switch]) -> Settings:
    for switch in switches:
        # A row for certain values of a setting says nothing about the others.
        if switch.verification != "kept" and (not switch.on_values or switch.is_on(args)):
            args = args.replace(SOURCE, **switch.get_off_values())
    return args


def _describe(args: Settings, name: str) -> str:
    value = getattr(args, name)
    return to_flag(name) if value is True else f"{to_flag(name)} {value}"
