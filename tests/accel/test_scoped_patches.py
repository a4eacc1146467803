"""What we change in other libraries acts inside our models' calls, and is gone afterwards."""

from __future__ import annotations

import gc
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._inductor import config as inductor_config
from torch.autograd.function import _SingleLevelFunction
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.nn.utils import clip_grad
from torch.optim import optimizer
from torch.utils.checkpoint import checkpoint
from transformers import BartConfig, BartModel, PreTrainedModel, masking_utils
from transformers.integrations import sdpa_attention
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rapidformer.accel import host_masks
from rapidformer.accel.applied import Applied
from rapidformer.accel.attention.kernel_order import _ORDERS
from rapidformer.accel.attention.kernel_scope import ATTENTION, KernelChoice, apply_choice
from rapidformer.accel.attention.learned_bias import interface
from rapidformer.accel.compile.compilation import apply_compile
from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.host_masks import make_masks_from_host
from rapidformer.accel.recompute.blocks import apply_recompute
from rapidformer.compat import transformers_masks
from rapidformer.compat.patches import Change, Entry, Patch
from rapidformer.compat.transformers_models import find_unknown_attention
from rapidformer.engine import RapidformerEngine
from rapidformer.models.plan import find_plan
from rapidformer.overlay import get_fact

from .models import get_loss, make

CUDNN, FLASH = KernelChoice(_ORDERS["cudnn"]), KernelChoice(_ORDERS["flash"])
WITH_TABLE = KernelChoice(_ORDERS["cudnn"], avoids_plans=True)
MASKS = (
    "_preprocess_mask_arguments",
    "_ignore_causal_mask_sdpa",
    "_ignore_bidirectional_mask_sdpa",
    "find_packed_sequence_indices",
)


def look() -> list[Any]:
    """Everything of torch and transformers that a call of ours changes."""
    masks = [getattr(masking_utils, name) for name in MASKS]
    check = PreTrainedModel.warn_if_padding_and_no_attention_mask
    tables = [dict(ALL_ATTENTION_FUNCTIONS), dict(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)]
    for table in tables:
        table.pop("rapidformer_by_row", None)  # a name of our own, which stays
    return [*masks, check, *tables, get_order()]


def get_order() -> list[SDPBackend]:
    order: list[SDPBackend] = _cur_sdpa_kernel_backends(with_priority=True)
    return order


@contextmanager
def listening(note: Callable[[], None]) -> Iterator[None]:
    """Calls ``note`` in every attention of torch."""
    attend = functional.scaled_dot_product_attention

    def listen(*args: Any, **kwargs: Any) -> torch.Tensor:
        note()
        return attend(*args, **kwargs)

    functional.scaled_dot_product_attention = listen
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = attend


def choose(model: nn.Module, choice: KernelChoice) -> nn.Module:
    plan = find_plan(model)
    apply_choice(model, plan.get_blocks(model) if plan.blocks else [], choice)
    return model


def collect_orders(model: nn.Module, family: str = "llama") -> list[list[SDPBackend]]:
    """The order in which torch tries kernels, at each attention of both passes."""
    orders: list[list[SDPBackend]] = []
    with listening(lambda: orders.append(get_order())):
        get_loss(model, family, has_cache=False).backward()
    return orders


# ---- the order of kernels ------------------------------------------------------------------------


def test_two_models_and_a_plain_one_have_their_own_orders() -> None:
    default = get_order()
    models = [choose(make("llama"), CUDNN), make("llama"), choose(make("llama"), FLASH)]
    expected = [list(CUDNN.order), default, list(FLASH.order)]
    for model, order in (*zip(models, expected, strict=True), (models[0], expected[0])):
        assert collect_orders(model) == [order] * 3
        assert get_order() == default


def test_a_model_inside_another_keeps_its_own_order() -> None:
    teacher = choose(make("custom"), FLASH)
    student = choose(make("custom"), CUDNN)
    orders: list[list[SDPBackend]] = []

    def teach(*_: object) -> None:
        get_loss(teacher, "custom")

    student.register_forward_pre_hook(teach)
    blocks = find_plan(student).get_blocks(student)
    blocks[1].register_forward_pre_hook(teach)
    with listening(lambda: orders.append(get_order())):
        get_loss(student, "custom")
    assert [order == list(FLASH.order) for order in orders] == (
        [True] * 3 + [False] + [True] * 3 + [False] * 2
    )


@pytest.mark.parametrize("kind", ["ours", "transformers", "by hand"])
def test_a_recomputed_block_gets_the_same_kernels(kind: str) -> None:
    model: Any = make("llama", 0.1)
    if kind == "transformers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    choose(model, FLASH)
    if kind == "ours":
        apply_recompute(model, find_plan(model))
    if kind == "by hand":
        for block in find_plan(model).get_blocks(model):
            block.forward = _recomputed(block.forward)
    orders = collect_orders(model)
    assert orders == [list(FLASH.order)] * 6


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def test_compiled_blocks_are_traced_with_the_models_kernels_and_only_once() -> None:
    model = choose(make("llama"), WITH_TABLE)
    apply_recompute(model, find_plan(model))
    orders: list[list[SDPBackend]] = []

    def note(graph: Any) -> None:
        orders.append(get_order())

    apply_compile(model, find_plan(model), backend="eager", rewrites=[note])
    for _ in range(2):
        get_loss(model, "llama", has_cache=False).backward()
    compiled = get_fact(model, CompiledBlocks)
    assert orders == [list(CUDNN.order)]
    assert (compiled.graphs, compiled.recompilations) == (1, 0)


# ---- transformers' tables and masks --------------------------------------------------------------


def test_only_a_model_with_the_kernel_for_a_learned_bias_is_computed_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(interface, "suits", lambda *_: calls.append(0))
    models = [make("t5") for _ in range(3)]
    choose(models[0], KernelChoice(_ORDERS["flash"], has_bias_kernel=True))
    choose(models[1], KernelChoice(_ORDERS["flash"], avoids_plans=True))
    for model, is_used in zip(models, (True, False, False), strict=True):
        calls.clear()
        get_loss(model, "t5")
        assert bool(calls) == is_used
    with ATTENTION:  # another thread runs a model of ours
        get_loss(models[2], "t5")
    assert not calls


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_nothing_is_left_after_a_call_even_a_failed_one(family: str) -> None:
    before = look()
    model = make(family)
    assert make_masks_from_host(model) == "built from host memory"
    choose(model, WITH_TABLE)
    inside: list[list[Any]] = []
    with listening(lambda: inside.append(look())):
        get_loss(model, family).backward()
    assert inside and all(seen != before for seen in inside)
    assert look() == before
    block = find_plan(model).get_blocks(model)[-1]
    block.register_forward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        get_loss(model, family)
    assert look() == before


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def test_a_plain_model_in_another_thread_makes_its_masks_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, plain = make("llama"), make("llama")
    make_masks_from_host(ours)
    asked: list[str] = []
    monkeypatch.setattr(
        host_masks, "find_host_copy", lambda _: asked.append(threading.current_thread().name)
    )

    def run() -> None:
        get_loss(plain, "llama", has_cache=False)

    def run_beside() -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=run, name="plain")
            thread.start()
            thread.join()

    with listening(run_beside):
        get_loss(ours, "llama", has_cache=False)
    assert set(asked) == {threading.main_thread().name}


# ---- a version that we do not know ---------------------------------------------------------------


def test_masks_are_off_and_say_why_if_a_function_takes_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions, more: None)
    engine = RapidformerEngine(args=["--lr", "0.1", "--device", "cpu", "--dynamic-shape", "off"])
    engine.compose(model=make("llama"))
    (line,) = (text for text in engine.model.parallelized.switches if "host masks" in text)
    assert re.fullmatch(
        r"host masks: off, since find_packed_sequence_indices of transformers \S+ "
        r"takes \(positions, more\), and rapidformer knows "
        r"find_packed_sequence_indices\(position_ids\) of transformers 5\.17 to 5\.22; "
        r"steps wait for the device",
        line,
    )
    (answer,) = (text for text in engine.explain().splitlines() if "host masks" in text)
    assert answer.startswith("not applicable")
    assert "find_packed_sequence_indices of transformers" in answer
    engine.close()


def test_a_class_that_makes_its_mask_in_another_way_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = BartConfig(
        vocab_size=32, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8,
    )  # fmt: skip
    assert make_masks_from_host(BartModel(config)) == "built from host memory"
    monkeypatch.setattr(transformers_masks, "_OWN_MASKS", ("another line",))
    line = make_masks_from_host(BartModel(config))
    assert "but not all: BartDecoder of transformers" in str(line)


def test_an_unknown_attention_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_unknown_attention() is None
    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", lambda module, qkv: None)
    assert "takes (module, qkv), and rapidformer knows" in str(find_unknown_attention())


# ---- changes with several users ------------------------------------------------------------------


def test_a_change_ends_with_its_last_user_in_any_order() -> None:
    table: dict[str, Any] = {"a": 1}
    patch = Patch(lambda: [Entry(table, "a", lambda x: x + 1), Entry(table, "b", lambda _: 5)])
    first, second = ExitStack(), ExitStack()
    first.enter_context(patch)
    assert table == {"a": 2, "b": 5} and patch.is_inside()
    second.enter_context(patch)
    first.close()
    assert table == {"a": 2, "b": 5}
    second.close()
    assert table == {"a": 1} and not patch.is_inside()
    with patch:
        table["a"] = 7  # a user's own registration stays
    assert table == {"a": 7}


@pytest.mark.parametrize("first", [0, 1])
def test_two_changes_of_one_value_end_in_any_order(first: int) -> None:
    """The later one changes what the earlier one has made of it, as long as that is there."""
    table: dict[str, Any] = {"a": "plain"}
    patches = [
        Patch(lambda: [Entry(table, "a", lambda x: f"a({x})"), Entry(table, "new", lambda x: [x])]),
        Patch(lambda: [Entry(table, "a", lambda x: f"b({x})"), Entry(table, "new", lambda x: [x])]),
    ]
    for _ in range(2):
        with ExitStack() as both:
            stacks = [both.enter_context(ExitStack()) for _ in patches]
            for stack, patch in zip(stacks, patches, strict=True):
                stack.enter_context(patch)
            assert table == {"a": "b(a(plain))", "new": [[None]]}
            stacks[first].close()
            assert table == {"a": ["b(plain)", "a(plain)"][first], "new": [None]}
            stacks[first].enter_context(patches[first])
            assert table["a"] == ["a(b(plain))", "b(a(plain))"][first]
        assert table == {"a": "plain"}


def test_an_engine_that_is_collected_sets_no_context_variable() -> None:
    """Within another one's ``set``, which a collection may interrupt, Python 3.11 would crash."""
    patch, applied = Patch(lambda: [Entry({}, "a", lambda _: 1)]), Applied()
    applied.enter(patch)
    assert patch.is_made and not patch.is_inside()
    with patch:
        del applied
        assert patch.is_made and patch.is_inside()
    assert not patch.is_made and not patch.is_inside()


def test_no_garbage_is_collected_while_a_value_is_changed() -> None:
    """It may hold an engine, whose change of the same value would end in between."""
    table: dict[str, Any] = {"a": "plain"}
    was_on = []
    patch = Patch(lambda: [Entry(table, "a", lambda _: was_on.append(gc.isenabled()))])
    with patch:
        assert was_on == [False] and gc.isenabled()
    assert gc.isenabled()


def test_a_change_of_what_cannot_be_built_leaves_nothing() -> None:
    table: dict[str, Any] = {"a": 1, "b": 0}
    patch = Patch(lambda: [Entry(table, "a", lambda x: x + 1), Entry(table, "b", lambda x: 1 / x)])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), patch:
            raise AssertionError("not reached")
        assert table == {"a": 1, "b": 0}


def test_a_change_that_fails_is_not_made() -> None:
    def fail() -> Callable[[], None]:
        raise ZeroDivisionError

    change = Change(fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), change:
            raise AssertionError("not reached")


# ---- engines -------------------------------------------------------------------------------------


class Doubling(torch.autograd.Function):
    """A user's function."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


def look_everywhere() -> list[Any]:
    """What engines change in the process while they are open, too."""
    modules = (clip_grad, masking_utils, attention, torch.autograd.function, optimizer)
    classes = (_SingleLevelFunction, torch.autograd.Function, PreTrainedModel)
    names = ("torch._dynamo.variables", "torch.fx.experimental.symbolic_shapes")
    return [
        *(dict(vars(owner)) for owner in (*modules, *classes)),
        dict(ALL_EXPERTS_FUNCTIONS),
        dict(optimizer._global_optimizer_post_hooks),
        [logging.getLogger(name).level for name in names],
        "rapidformer" in os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""),  # torch has its own
        torch.backends.mha.get_fastpath_enabled(),
        inductor_config.get_config_copy(),  # type: ignore[attr-defined]
        dynamo_config.get_config_copy(),  # type: ignore[attr-defined]
        *look(),
    ]


def train_plainly(model: Any) -> list[torch.Tensor]:
    """The loss and gradients of a model that no engine has seen, with functions of its user's."""
    orders: list[list[SDPBackend]] = []
    model.zero_grad()
    with listening(lambda: orders.append(get_order())):
        loss = get_loss(model, "llama", has_cache=False)
        Doubling.apply(loss).backward()
    assert orders == [get_order()] * 3
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def make_engine(*flags: str) -> RapidformerEngine:
    common = ("--lr", "0.1", "--train-iters", "4", "--device", "cpu", "--log-level", "error")
    return RapidformerEngine(args=[*flags, *common])


@pytest.mark.parametrize(
    "flags",
    [
        ("--fused-loss", "on"),
        ("--compile", "--compile-backend", "aot_eager"),
        ("--compile", "--compile-backend", "inductor"),
        ("--attention", "eager", "--checkpoint-activations"),
    ],
    ids=lambda flags: flags[-1],
)
def test_a_plain_model_beside_a_composed_one_is_the_same_and_nothing_is_left(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    plain, ours, other = (make("llama") for _ in range(3))
    expected, before = train_plainly(plain), look_everywhere()
    first, second = make_engine(*flags), make_engine()
    first.compose(ours)
    second.compose(other)
    ids = torch.arange(12).view(2, 6) + 1
    for engine, model in ((first, ours), (second, other)):
        if "inductor" not in flags or model is other:  # generated code would need a compiler
            engine.backward(model(input_ids=ids, labels=ids).loss)
            engine.step()
        for found, value in zip(train_plainly(plain), expected, strict=True):
            assert torch.equal(found, value)
    first.close()
    second.close()
    for found, value in zip(look_everywhere(), before, strict=True):
        assert found == value
    for found, value in zip(train_plainly(plain), expected, strict=True):
        assert torch.equal(found, value)
