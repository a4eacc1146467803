"""Applies ``--dynamic-shape``: blocks compute on real tokens only, if ``proof.py`` agrees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rapidformer.accel.applied import Applied
from rapidformer.accel.assembly import Assembly, Enter, Stages
from rapidformer.accel.attention import disentangled
from rapidformer.accel.context.exchanged_attention import PREFIX, find_configs
from rapidformer.accel.dropout_seeds import has_dropout
from rapidformer.accel.unpad import batches, tokenwise
from rapidformer.accel.unpad.block_code import BlockCode
from rapidformer.accel.unpad.blocks import (
    extend_blocks,
    extend_inner_models,
    find_attention,
    group_by_stack,
)
from rapidformer.accel.unpad.calls import Call, Help, Removal
from rapidformer.accel.unpad.kernels import NAME, register, use_rows
from rapidformer.accel.unpad.on_demand import WATCHING, Unpadded, settle
from rapidformer.accel.unpad.promises import find_promise
from rapidformer.accel.unpad.proof import find_difference, run_whole
from rapidformer.accel.unpad.row_attention import compile_with_dropout
from rapidformer.accel.unpad.rows import Rows, Sides
from rapidformer.accel.unpad.scanned_rows import find_scanning
from rapidformer.accel.unpad.sides import (
    extend_sides,
    find_biased,
    find_stacks,
    is_encoder_decoder,
    read_sides,
)
from rapidformer.compat.torch_dispatch import find_unknown_functions, is_transformed, tree_map_only
from rapidformer.compat.torch_modules import uncompiled
from rapidformer.compat.transformers_models import get_attention, is_own_model, set_attention
from rapidformer.dist.collectives import max_over_all
from rapidformer.errors import ConfigurationError
from rapidformer.hub import quiet_transformers
from rapidformer.models.own_loss import shifts_labels
from rapidformer.models.plan import ModelPlan, runs_in_library_code
from rapidformer.models.watched import Watching, find_requested, list_inner_modules
from rapidformer.overlay import extend, get_fact, get_own_class, list_layers, put_fact, remove

_UNPADDED = {"sdpa": NAME, PREFIX + "sdpa": PREFIX + NAME}
"""What takes the place of a model's attention."""

assert tokenwise  # it fills the table of operations that need no padding


def apply(assembly: Assembly) -> str | None:
    """Run the blocks on real tokens, if the model allows it."""
    args = assembly.args
    is_asked, help_of_others = args.dynamic_shape == "on", Help.NONE
    if assembly.wants("ZeRO") and assembly.topology.num_replicas > 1:
        # A rank cannot repeat a forward pass alone.
        help_of_others = Help.PROMISED if is_asked else Help.NEEDED
    if assembly.pipeline is not None:
        help_of_others = Help.TOGETHER
    obstacle = _find_obstacle(assembly) or apply_unpadding(
        assembly.model, assembly.whole_plan, assembly.precision.dtype,
        is_compiled=assembly.wants("compilation"),
        applied=assembly.applied, help_of_others=help_of_others,
        splits_tokens=assembly.wants("sequence parallelism"),
        sharing=assembly.topology.get_group("context"),
        pipeline=assembly.pipeline, only_in_graphs=_only_pays_in_graphs(assembly),
    )  # fmt: skip
    if obstacle is None:
        is_16_bit = assembly.precision.dtype is not None
        if assembly.is_training and is_16_bit and has_dropout(assembly.model):
            compile_with_dropout(assembly.device)
        removal = get_fact(assembly.model, Removal)
        assembly.applied.current.find_obstacle = lambda: removal.problem
        in_graphs = " in CUDA graphs" if _only_pays_in_graphs(assembly) else ""
        return f"blocks compute on real tokens only{in_graphs}"
    if is_asked:
        raise ConfigurationError(f"--dynamic-shape on: {obstacle}. Leave the flag out.")
    assembly.applied.leave_off(obstacle)
    return None


def _find_obstacle(assembly: Assembly) -> str | None:
    """Why this model cannot be unpadded in this run, beside what the row says."""
    is_compiled = assembly.wants("compilation")
    if is_compiled and assembly.device.type == "cuda" and find_biased(assembly.model):
        return "on a GPU, --compile needs flash attention, which takes no position bias"
    has_graphs = assembly.wants("CUDA graph") or assembly.wants("forward graphs")
    if _only_pays_in_graphs(assembly) and not has_graphs:
        return "on a GPU, it makes encoder-decoder models faster only in CUDA graphs"
    if assembly.deferred is not None:
        return "the model has no weights yet, so results without padding cannot be checked"
    return find_unknown_functions()


def _only_pays_in_graphs(assembly: Assembly) -> bool:
    """Whether launching more kernels would cost more than padding does, as far as is known."""
    is_default = assembly.args.dynamic_shape == "auto"
    return is_default and assembly.device.type == "cuda" and is_encoder_decoder(assembly.model)


def apply_unpadding(
    model: nn.Module,
    plan: ModelPlan,
    dtype: torch.dtype | None = None,
    *,
    is_compiled: bool = False,
    applied: Applied | None = None,
    help_of_others: Help = Help.NONE,
    splits_tokens: bool = False,
    sharing: dist.ProcessGroup | None = None,
    pipeline: Stages | None = None,
    only_in_graphs: bool = False,
) -> str | None:
    """Unpad a model's batches, under autocast to ``dtype``; returns why not, if it cannot."""
    problem = find_problem(model, plan)
    if problem is not None:
        return problem
    register()
    WATCHING.keep(applied)
    stacks = group_by_stack(plan) if pipeline is None else pipeline.stacks
    parts = [(plan, run_whole)] if pipeline is None else pipeline.list_alone(model)
    has_all_tokens = pipeline is None and sharing is None and not splits_tokens
    is_by_call = has_all_tokens and _may_know_call(model, plan)
    scans = is_by_call and any(map(find_scanning, plan.get_blocks(model)))
    ways = _list_ways(model, plan, may_pad=is_by_call and not is_compiled, scans=scans)
    if not ways:
        return f"{type(model).__name__} needs sdpa attention to run without padding here"
    code = BlockCode(model, plan.blocks)
    if code.problem is not None and pipeline is None:  # it may not even be tried without effects
        return f"{type(model).__name__} may give other results later: its blocks {code.problem}"
    for pads_attention in ways:
        restore = _extend_parts(model, stacks, pads_attention=pads_attention, scans=scans)
        trial = Removal(is_trial=True)
        unpadded = functools.partial(_call_unpadded, model, trial, rounds_up=is_compiled)
        find = functools.partial(
            _find_difference, model, trial, unpadded, parts, dtype, sharing, code
        )
        # transformers warns if one asks a model without a head for its loss.
        with uncompiled(model.modules()), quiet_transformers(None):
            difference = find()
            # Padded attention would need a mask that keeps packed examples apart.
            may_pack = difference is None and not pads_attention and shifts_labels(model)
            packs = may_pack and not find(is_packed=True)
        if difference is None:
            break
        restore()
    if difference is not None:
        return f"{type(model).__name__} gives other results without padding ({difference})"
    code.note()
    removal = Removal(
        help_of_others=help_of_others, rounds_up=is_compiled, pads_attention=pads_attention,
        is_by_call=pads_attention or scans, only_in_graphs=only_in_graphs,
    )  # fmt: skip
    put_fact(model, removal)
    _extend_model(model, plan, removal, code, packs=packs)
    return None


def _list_ways(model: nn.Module, plan: ModelPlan, *, may_pad: bool, scans: bool) -> list[bool]:
    """Whether attention gets padded rows, in the order to try: only if it takes no others."""
    if disentangled.is_applied(model):
        return [False]
    has_sdpa = any(get_attention(part) in _UNPADDED for part in find_configs(model))
    may_pad = may_pad and all(map(find_attention, plan.get_blocks(model)))
    return [False] * (has_sdpa or scans) + [True] * may_pad


def _may_know_call(model: nn.Module, plan: ModelPlan) -> bool:
    """Whether blocks may get their rows from the call of the model, and not by their arguments.

    Nothing runs them again later, or in another order than the model's own.
    """
    blocks = plan.get_blocks(model)
    is_repeated = any("recompute" in list_layers(block) for block in blocks)
    is_known = runs_in_library_code(model, plan.blocks[0])
    return is_known and not is_repeated and not is_encoder_decoder(model)


def _find_difference(
    model: nn.Module, trial: Removal, unpadded: Any, parts: Sequence[tuple[ModelPlan, Enter]],
    dtype: torch.dtype | None, sharing: dist.ProcessGroup | None, code: BlockCode,
    *, is_packed: bool = False,
) -> str | None:  # fmt: skip
    """How results without padding differ: of the whole model, or of any stage on any rank."""
    found = [
        find_difference(
            model, plan, unpadded, dtype, is_packed=is_packed, sharing=sharing, enter=enter
        )
        for plan, enter in parts
    ]
    difference = next(filter(None, found), None)
    if difference is None and not trial.is_on:
        difference = "it reads what its blocks return for padding"
    if difference is None and not trial.has_packed:
        difference = "its blocks get other rows than the batch has"
    if difference is None and code.problem is not None:
        difference = f"or may give some later, since code in its blocks {code.problem}"
    # A model's stages agree, since each rank has seen only its own.
    is_elsewhere = parts[0][1] is not run_whole and max_over_all([int(difference is not None)])[0]
    return difference or ("in a stage on another rank" if is_elsewhere else None)


def _extend_parts(
    model: nn.Module, stacks: Sequence[Sequence[str]], *, pads_attention: bool, scans: bool
) -> Callable[[], None]:
    """Let attention, blocks and stacks run unpadded when asked to; returns how to undo it."""
    chosen = [(config, get_attention(config)) for config in find_configs(model)]
    configs = [(config, name) for config, name in chosen if name in _UNPADDED]
    for config, name in configs if not pads_attention else ():
        set_attention(config, _UNPADDED[name])
    restore_blocks = extend_blocks(model, stacks, pads_attention=pads_attention, scans=scans)
    sides = find_stacks(model) if is_encoder_decoder(model) else None
    extended = extend_inner_models(model) if sides is None else extend_sides(model, *sides)

    def restore() -> None:
        restore_blocks()
        for module in extended:
            remove(module, "unpad")
        for config, name in configs:
            set_attention(config, name)

    return restore


def _extend_model(
    model: nn.Module, plan: ModelPlan, removal: Removal, code: BlockCode, *, packs: bool
) -> None:
    """Let a model run without padding on batches whose loss cannot change.

    With ``packs``, packed examples are computed apart as well.
    """
    # A user's hook inside blocks must see what it would see without the switch.
    watching = Watching(list_inner_modules(model, plan.blocks))
    is_staged = removal.help_of_others is Help.TOGETHER

    def may_remove(model: nn.Module, *, is_by_position: bool) -> bool:
        """Whether padding may be removed from such a call, and the model is as it was tried."""
        if is_transformed():  # what stands for padding could not be followed
            return False
        if is_staged and not torch.is_grad_enabled():  # nothing would repeat such a call
            return False
        if watching.find_watched() or code.has_changed():
            removal.is_missed |= is_staged
            return False
        is_on = removal.is_on or is_by_position
        return is_on and (not removal.is_by_call or _is_called_once(model))

    def build(cls: Any) -> dict[str, Any]:
        @functools.wraps(cls.forward)  # trainers read the signature to choose a batch's columns
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(cls.forward, self, *args, **kwargs)
            is_by_position = packs and batches.is_packed(kwargs)
            if not may_remove(self, is_by_position=is_by_position):
                return run()
            if is_by_position:
                examples = batches.find_packed_rows(self, kwargs, rounds_up=removal.rounds_up)
                return run() if examples is None else _call_packed(run, examples, kwargs)
            promise = find_promise(kwargs)
            if promise is None and not _may_lack_padding(self, removal, kwargs):
                return run()
            rows = batches.find_rows(self, kwargs, rounds_up=removal.rounds_up)
            if rows is None:
                return run()
            removal.has_removed = True
            if promise is not None and promise.reads_all_tokens:
                with use_rows(rows):
                    return run()
            if isinstance(rows, Sides):  # nothing could use a cache of packed tokens
                run = functools.partial(run, use_cache=False)
            return call_without_padding(
                self, run, rows, removal, is_promised=promise is not None,
                labelled=batches.count_labelled(self, kwargs),
            )  # fmt: skip

        return {"forward": forward}

    extend(model, "unpad", build)


def call_without_padding(
    model: nn.Module, run: Any, rows: Rows | Sides, removal: Removal, *, is_promised: bool = False,
    labelled: int | None = None,
) -> Any:  # fmt: skip
    """Run a model's forward pass without padding."""
    device = rows.each[0].places.device
    call = Call(
        removal, run, device, knows_labels=is_library_code(model), is_promised=is_promised,
        labelled=labelled,
    )  # fmt: skip
    with use_rows(rows):
        output = call.run(run)
    return _release(output)


def _is_called_once(model: nn.Module) -> bool:
    """Whether no block is run again in the backward pass; predictions may be replayed as graphs."""
    is_repeated = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    return torch.is_grad_enabled() and not is_repeated


def _release(output: Any) -> Any:
    """What a model returns: without gradients, only plain tensors, unless padding is not read."""

    def change(tensor: Unpadded) -> Tensor:
        may_stay = torch.is_grad_enabled() or tensor.is_promised
        return tensor if tensor.is_lazy and may_stay else settle(tensor)

    if isinstance(output, Unpadded):
        return change(output)
    # Outputs of transformers, and classes of one's own like them: entries, attributes or both.
    tables: list[Any] = [output, getattr(output, "__dict__", None)]
    for table in filter(lambda part: isinstance(part, dict), tables):
        for name, value in list(table.items()):
            if isinstance(value, Unpadded):
                table[name] = change(value)
    return tree_map_only(Unpadded, change, output)


def is_library_code(model: nn.Module) -> bool:
    """Whether a model and its loss are transformers' own."""
    loss = getattr(model, "loss_function", None)
    is_own_loss = str(getattr(loss, "__module__", "")).startswith("transformers.")
    return is_own_model(get_own_class(model)) and (loss is None or is_own_loss)


def _may_lack_padding(model: nn.Module, removal: Removal, given: Mapping[str, Any]) -> bool:
    """Whether nobody is going to read padding, or this rank can compute it then."""
    shapes = [getattr(given.get(n), "shape", n) for n in ("labels", "attention_mask")]
    has_label_per_token = shapes[0] == shapes[1] or is_encoder_decoder(model)
    # Without gradients, results for each token are predictions, which someone reads as a whole.
    if has_label_per_token and not torch.is_grad_enabled():
        return False
    # transformers' models return nothing for padding if there is one label per row.
    is_closed = is_library_code(model) and not has_label_per_token
    return removal.help_of_others is not Help.NEEDED or is_closed


def _call_packed(run: Any, rows: Rows, batch: dict[str, Any]) -> Any:
    """Run a model's forward pass on packed examples, each by itself."""
    # Of ones: rows keep the examples apart, so the model need not do it.
    mask = torch.ones_like(batch["position_ids"])
    with use_rows(rows):
        return run(attention_mask=mask)


def find_problem(model: Any, plan: ModelPlan) -> str | None:
    """Why a model cannot be unpadded, as far as its configuration shows."""
    config = getattr(model, "config", None)
    if config is None or not plan.blocks or not find_configs(model):
        return f"{type(model).__name__} is not a transformers model with repeated blocks"
    main_input = getattr(model, "main_input_name", "input_ids")
    if main_input != "input_ids":
        return f"{type(model).__name__} takes {main_input}, which are not tokens"
    if "MultipleChoice" in type(model).__name__:
        return f"{type(model).__name__} has several rows per sample, which is not supported yet"
    if getattr(config, "model_type", "") == "encoder-decoder":
        # Its decoder masks every label that equals the padding token, wherever it is.
        return f"{type(model).__name__} derives its decoder's mask from the labels"
    if is_encoder_decoder(model) and find_stacks(model) is None:
        return f"{type(model).__name__} does not use both an encoder and a decoder"
    if is_encoder_decoder(model) and model.get_output_embeddings() is None:
        # Its decoder reads the input again, and its labels say nothing about padding.
        return f"{type(model).__name__} is an encoder-decoder whose labels are not text"
    asked = find_requested(model, {})
    return asked and f"its configuration sets {asked}, whose result includes padding"


def _call_unpadded(
    model: nn.Module, trial: Removal, batch: dict[str, Any], *, rounds_up: bool
) -> Any:
    """Run a small batch of ``proof.py`` without padding, or with packed examples apart."""
    run = functools.partial(model.forward, **batch)
    if "position_ids" in batch:
        positions = batch["position_ids"]
        rows = Rows.read_packed(positions.cpu(), positions.device, rounds_up=rounds_up)
        return _call_packed(run, rows, batch)
    if is_encoder_decoder(model):
        sides = read_sides(batch, rounds_up=rounds_up)
        assert sides is not None
        return call_without_padding(model, run, sides, trial)
    mask = batch["attention_mask"]
    rows = Rows.read(mask.bool().cpu().numpy(), mask.device, rounds_up=rounds_up)
    return call_without_padding(model, run, rows, trial)
