"""torch.compile block by block: equal results, no other names, one graph for equal blocks."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM
from transformers.models.dinov2.modeling_dinov2 import Dinov2LayerScale

from rapidformer import RapidformerEngine
from rapidformer.accel.attention.kernel_scope import KernelChoice, apply_choice
from rapidformer.accel.cache import skip_cache_in_training
from rapidformer.accel.compile.compilation import (
    KEPT_CODE,
    apply_compile,
    find_outer_norms,
    limit_size,
)
from rapidformer.accel.compile.compiled_blocks import CompiledBlocks
from rapidformer.accel.cuda_graph.block_calls import without_cast_cache
from rapidformer.accel.precision.autocast import apply_mixed_precision
from rapidformer.accel.precision.precision import Precision
from rapidformer.accel.recompute.blocks import apply_recompute
from rapidformer.accel.unpad.calls import Removal
from rapidformer.compat.peft import adapters_off
from rapidformer.errors import ConfigurationError
from rapidformer.log import configure_logging, warn_once
from rapidformer.models.plan import ModelPlan, find_plan
from rapidformer.overlay import find_fact, get_fact
from tests.parity.models import build_model
from tests.test_process_state import COMPILED, list_changes, look, look_at_torch

from .models import make

pytestmark = pytest.mark.slow

Batch = dict[str, torch.Tensor]
VARIED = [(2, 8), (2, 8), (2, 11), (3, 7), (2, 8)]
"""Rows and tokens of the batches of a run whose lengths vary."""
FIXED = [(2, 8)] * 3


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    configure_logging("info")
    yield
    torch._dynamo.reset()


def make_batch(name: str, rows: int, tokens: int) -> Batch:
    if name == "vit":
        pixels = torch.linspace(-1, 1, rows * 3 * 256).reshape(rows, 3, 16, 16)
        return {"pixel_values": pixels, "labels": torch.arange(rows) % 2}
    ids = torch.arange(rows * tokens).reshape(rows, tokens) % 20 + 1
    if name == "small-plain":
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    mask[-1, tokens // 2 :] = 0
    labels = torch.arange(rows) % 2 if name == "small-bert" else ids
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def get_gradients(model: nn.Module, batches: list[Batch]) -> list[torch.Tensor]:
    """Losses of the micro-batches of one update, and what they add up to in ``.grad``."""
    torch.manual_seed(1)
    model.zero_grad()
    losses = [model(**batch)["loss"] for batch in batches]
    for loss in losses:
        loss.backward()
    return losses + [p.grad.clone() for p in model.parameters() if p.grad is not None]


def evaluate(model: nn.Module, batches: list[Batch]) -> list[torch.Tensor]:
    with torch.no_grad():
        losses = [model.eval()(**batch)["loss"] for batch in batches]
    model.train()
    return losses


def run(model: nn.Module, name: str, sizes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Two updates of several micro-batches, and evaluations between them if sizes vary."""
    batches = [make_batch(name, *size) for size in sizes]
    first = get_gradients(model, batches[:2])
    evaluated = evaluate(model, batches[2:]) if sizes is VARIED else []
    return first + evaluated + get_gradients(model, batches[1:])


def compile_blocks(model: nn.Module, backend: Any = "eager") -> CompiledBlocks:
    skip_cache_in_training(model)
    plan = find_plan(model)
    apply_compile(model, plan, backend=backend, norms=find_outer_norms(model, plan))
    return get_fact(model, CompiledBlocks)


def test_a_cache_is_skipped_in_a_model_that_only_passes_the_argument_on() -> None:
    config = GraniteMoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model = GraniteMoeForCausalLM(config)
    skip_cache_in_training(model)
    ids = torch.arange(3, 9)[None]
    assert model.train()(input_ids=ids).past_key_values is None
    assert model.eval()(input_ids=ids).past_key_values is not None
    own = OwnGranite(config)
    skip_cache_in_training(own)
    assert own.train()(ids).past_key_values is not None


class OwnGranite(GraniteMoeForCausalLM):  # type: ignore[misc]
    """A user's model, which decides about the cache itself."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return self.model(input_ids, use_cache=True, **kwargs)


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


# T5 has four kinds of blocks: its first blocks hold the bias table. If sizes vary, a kind has a
# graph for the first size, one for all others, and one for evaluation. Norms outside the blocks are
# compiled as well if they are Python code.
@pytest.mark.parametrize(
    ("name", "sizes", "graphs"),
    [("small-gpt2", VARIED, 3), ("small-bert", FIXED, 1), ("small-llama", FIXED, 2),
     ("qwen3", FIXED, 2), ("small-t5", FIXED, 5), ("vit", FIXED, 1), ("small-plain", FIXED, 1)],
)  # fmt: skip
def test_a_kind_of_block_is_compiled_once_for_the_first_size_and_once_for_all_others(
    name: str, sizes: list[tuple[int, int]], graphs: int
) -> None:
    model = build_model(name, 0.0, layers=2).train()
    expected = run(model, name, sizes)
    compiled = compile_blocks(model)
    assert_close(run(model, name, sizes), expected)
    assert (compiled.graphs, compiled.recompilations) == (graphs, 0)
    assert compiled.describe().endswith(", 0 recompilations")


def test_a_kind_of_block_is_compiled_once_if_other_sizes_are_expected() -> None:
    model = build_model("small-gpt2", 0.0, layers=2).train()
    expected = run(model, "small-gpt2", VARIED)
    compiled = compile_blocks(model)
    compiled.expect_other_sizes()
    assert_close(run(model, "small-gpt2", VARIED), expected)
    assert (compiled.graphs, compiled.recompilations) == (2, 0)  # in training and in evaluation


def test_a_model_without_its_adapters_has_a_graph_of_its_own() -> None:
    """The reference of DPO, between evaluations with adapters."""
    model = build_model("small-gpt2-lora").eval()
    skip_cache_in_training(model)
    apply_compile(model, find_plan(model), backend="eager")
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for _ in range(2):
            model(input_ids=ids, use_cache=False)
            with adapters_off(model):
                model(input_ids=ids, use_cache=False)
    compiled = get_fact(model, CompiledBlocks)
    assert (compiled.graphs, compiled.recompilations) == (2, 0)


def test_a_recomputed_adapter_in_bf16_needs_a_second_graph_for_the_first_block_only() -> None:
    """The embeddings are frozen, so the first block's input needs no gradient."""
    model = build_model("small-gpt2-lora", 0.0, layers=3).train()
    apply_recompute(model, find_plan(model))
    precision = Precision(dtype=torch.bfloat16, reason="for the test")
    apply_mixed_precision(model, precision, torch.device("cpu"))
    expected = run(model, "small-gpt2", FIXED)
    compiled = compile_blocks(model)
    assert_close(run(model, "small-gpt2", FIXED), expected)
    assert (compiled.graphs, compiled.recompilations) == (2, 0)


class Scaled(nn.Module):
    """A block with a factor of its own, such as GPT-2's with scale_attn_by_inverse_layer_idx."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.factor


def test_more_kinds_of_blocks_than_torch_compiles_a_function_for() -> None:
    model = nn.Sequential(*[Scaled(1.0 / number) for number in range(1, 11)])
    plan = ModelPlan(blocks=tuple(str(number) for number in range(10)))
    apply_compile(model, plan, backend="eager")
    expected = torch.full((3,), 1 / 3628800)
    torch.testing.assert_close(model(torch.ones(3)), expected, rtol=1e-5, atol=0.0)
    assert get_fact(model, CompiledBlocks).graphs == 10


def test_lengths_that_equal_another_size_get_no_graph_of_their_own() -> None:
    """The second length is the hidden size: torch would assume that it always is."""
    model = build_model("small-bert", 0.0, layers=1).train()
    compiled = compile_blocks(model)
    for tokens in (8, 16, 12):
        get_gradients(model, [make_batch("small-bert", 2, tokens)])
    assert (compiled.graphs, compiled.recompilations) == (2, 0)


def test_a_graph_for_all_sizes_takes_no_floats() -> None:
    """torch would trace it with its floats as inputs first, and discard that."""
    inputs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        inputs.append(len(graph.graph.find_nodes(op="placeholder")))
        return graph

    block = Scaled(2.0)
    compiled = CompiledBlocks(backend)
    compiled.add(block)
    for size in (3, 4, 5):
        assert torch.equal(block(torch.ones(size)), torch.full((size,), 2.0))
    assert inputs == [1, 2], "the tensor, then the tensor and its size"
    assert compiled.recompilations == 0


def test_what_is_compiled_again_for_all_sizes_keeps_plans_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN would make a plan for each new size, which takes longer than the attention."""
    orders: list[bool] = []
    late: list[bool] = []

    @contextmanager
    def note(order: list[SDPBackend], *, set_priority: bool) -> Iterator[None]:
        late.append(order[0] is not SDPBackend.CUDNN_ATTENTION)
        yield
        late.pop()

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        orders.append(bool(late) and late[-1])
        return graph

    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", note)
    block = Scaled(2.0)
    order = (SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)
    apply_choice(block, [], KernelChoice(order, avoids_plans=True))
    CompiledBlocks(backend).add(block)
    for size, factor in ((3, 2.0), (4, 2.0), (5, 3.0)):
        block.factor = factor
        block(torch.ones(size))
    assert orders == [False, True, True], "the first size; all others; all others again"


def test_what_torch_compiles_again_is_counted_and_reported_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = build_model("small-bert", 0.1, layers=1).train()
    compiled = compile_blocks(model)
    batch = make_batch("small-bert", 2, 8)
    model(**batch)
    assert "compiled again" not in capsys.readouterr().err
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    model(**batch)
    assert (compiled.graphs, compiled.recompilations) == (2, 1)
    warning = capsys.readouterr().err
    assert "--compile: BertLayer was compiled again, which stalls the step:" in warning
    assert "0.1" in warning


def test_generation_runs_uncompiled_and_leaves_the_graphs_of_training() -> None:
    model: Any = build_model("small-llama", 0.0, layers=2).eval()
    ids = torch.arange(1, 9).reshape(2, 4)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    compiled = compile_blocks(model)
    assert torch.equal(model.generate(ids, **options), expected)
    assert compiled.graphs == 0


def test_names_and_classes_stay_and_the_model_can_be_pickled() -> None:
    model = make("bert")
    names, cls = list(model.state_dict()), type(model)
    compile_blocks(model)
    assert list(model.state_dict()) == names
    assert type(model) is cls
    copied = pickle.loads(pickle.dumps(model))
    assert list(copied.state_dict()) == names
    assert get_fact(copied, CompiledBlocks).graphs == 0


def test_norms_outside_the_blocks_are_found_unless_they_are_torchs_or_have_hooks() -> None:
    llama: Any = build_model("small-llama", 0.0, layers=1)
    assert find_outer_norms(llama, find_plan(llama)) == [llama.model.norm]
    llama.model.norm.register_forward_hook(lambda *_: None)
    assert find_outer_norms(llama, find_plan(llama)) == []
    llama.model.norm = Dinov2LayerScale(SimpleNamespace(layerscale_value=1.0, hidden_size=8))
    assert find_outer_norms(llama, find_plan(llama)) == []
    bert = build_model("small-bert", 0.0, layers=1)
    assert find_outer_norms(bert, find_plan(bert)) == []


def keep_half(module: nn.Module, args: Any, output: Any) -> Any:
    return (output[0] / 2, *output[1:]) if isinstance(output, tuple) else output / 2


def test_hooks_of_one_block_run_in_that_block_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Equal blocks share compiled code, and torch puts the hooks of the first one into it."""
    model, plain = make("bert"), make("bert")
    warn_once.cache_clear()
    apply_compile(model, find_plan(model), backend="eager")

    def hook(each: Any) -> None:
        first, last = each.bert.encoder.layer[0], each.bert.encoder.layer[-1]
        first.register_forward_hook(keep_half)
        last.intermediate.register_full_backward_hook(lambda m, found, given: (2 * found[0],))

    hook(model)
    hook(plain)
    batches = [make_batch("small-bert", 2, 8)]
    assert_close(get_gradients(model, batches), get_gradients(plain, batches))
    assert "with hooks runs uncompiled" in caplog.text
    added = [each.bert.encoder.layer[1].output.register_forward_hook(keep_half)
             for each in (model, plain)]  # fmt: skip
    assert_close(get_gradients(model, batches), get_gradients(plain, batches))
    for handle in added:
        handle.remove()
    assert_close(get_gradients(model, batches), get_gradients(plain, batches))


def test_neither_embeddings_nor_the_loss_are_compiled() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    model = make("bert")
    compile_blocks(model, backend)
    model(**make_batch("small-bert", 2, 6))
    (graph,) = graphs
    text = graph.print_readable(print_output=False)
    assert "scaled_dot_product_attention" in text
    assert "embedding" not in text
    assert "cross_entropy" not in text


def test_an_encoder_of_torch_is_evaluated_uncompiled_on_its_nested_tensors() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    hidden, padding = torch.rand(2, 5, 8), torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad():
        expected = model.eval()(hidden, src_key_padding_mask=padding)
        compiled = compile_blocks(model)
        assert torch.equal(model(hidden, src_key_padding_mask=padding), expected)
    assert not compiled.graphs


def test_model_without_blocks_is_compiled_whole_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Linear(2, 2)
    expected = model(torch.ones(1, 2))
    compiled = compile_blocks(model)
    assert torch.equal(model(torch.ones(1, 2)), expected)
    assert compiled.graphs == 1
    assert "no repeated blocks were found in Linear" in capsys.readouterr().err


def test_outputs_of_activation_functions_are_recomputed_for_the_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 4))
    batch = torch.linspace(-1, 1, 12).reshape(3, 4)
    saved: list[torch.Size] = []

    def run_once() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (saved.append(tensor.shape), tensor)[1], lambda tensor: tensor
        ):
            loss = model(batch).square().sum()
        loss.backward()
        return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = run_once()
    assert saved.count(torch.Size([3, 32])) == 2, "before and after SiLU"
    saved.clear()
    compile_blocks(model, backend="aot_eager")
    assert_close(run_once(), expected)
    assert saved.count(torch.Size([3, 32])) == 1


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_cpu_compiles_only_if_a_backend_is_asked_for(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the run is that without --compile, and says so."""
    warn_once.cache_clear()
    engine = RapidformerEngine(args={"compile": True, "compile_backend": backend, "lr": 1e-3})
    model: Any = engine.compose(build_model("gpt2"))[0]
    asked = backend != "auto"
    assert (find_fact(model, CompiledBlocks) is not None) == asked
    removal = find_fact(model, Removal)
    assert removal is not None and removal.rounds_up == asked
    assert ("--compile has no effect: on a CPU" in capsys.readouterr().err) != asked
    engine.close()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--compile-backend inducter: .* has .*inductor"):
        compile_blocks(nn.Linear(2, 2), backend="inducter")


def test_kernels_are_kept_in_the_users_cache_folder_unless_one_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(variable, "/chosen")
    with KEPT_CODE:
        assert os.environ[variable] == "/chosen"
    assert os.environ[variable] == "/chosen"
    monkeypatch.delenv(variable)
    with KEPT_CODE:
        assert os.environ[variable] == str(tmp_path / "rapidformer" / "torchinductor")
    assert variable not in os.environ
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with KEPT_CODE:
        assert variable not in os.environ
    # A container's user without an entry in /etc/passwd.
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with KEPT_CODE:
        assert variable not in os.environ


def test_the_oldest_code_is_removed_from_a_large_folder(tmp_path: Path) -> None:
    for name, age in (("new", 0), ("old", 2), ("older", 3), ("oldest", 4)):
        path = tmp_path / "ab" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 10)
        moment = time.time() - age * 24 * 3600
        os.utime(path, (moment, moment))
    limit_size(tmp_path, most=100)
    limit_size(tmp_path, most=25)
    assert {path.name for path in (tmp_path / "ab").iterdir()} == {"new", "old"}
    limit_size(tmp_path, most=0)
    assert [path.name for path in (tmp_path / "ab").iterdir()] == ["new"]


class FeedForward(nn.Module):
    """A block of few operations: each fused group of them is a C++ file of its own to compile.

    Here it is one file in each direction; sums over rows, such as a bias has, would be others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(nn.functional.gelu(self.norm(hidden)))


def test_generated_code_computes_the_same() -> None:
    """The one test with inductor's code, the default: generating it takes many seconds.

    Most of them go to the C++ compiler, which reads torch's headers again for each file. Compiling
    the headers first pays off with more files only, and so does trying out instruction sets.
    The process is left as it was, too.
    """
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(), FeedForward())
    rows = torch.randn(2, 8, 16, requires_grad=True)  # as behind an embedding: one graph for both

    def run_twice() -> list[torch.Tensor]:
        model.zero_grad()
        losses = [model(rows * scale).square().mean() for scale in (1.0, 0.5)]
        sum(losses).backward()
        return losses + [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = run_twice()
    assert len(expected) == 2 + 2
    before = look() | look_at_torch()
    with torch._inductor.config.patch(
        {"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}
    ):
        apply_compile(model, ModelPlan(blocks=("0", "1")))
        found = run_twice()
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    compiled = get_fact(model, CompiledBlocks)
    assert (compiled.graphs, compiled.recompilations) == (1, 0)
    changes = list_changes(before, look() | look_at_torch())
    assert not [change for change in changes if not change.startswith(tuple(COMPILED))]


def test_a_recording_without_copies_of_weights_compiles_nothing_again() -> None:
    block, compiled = nn.Linear(3, 3), CompiledBlocks("eager")
    compiled.add(block)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, count = block(torch.ones(2, 3)), compiled.graphs
        with without_cast_cache():
            assert torch.equal(block(torch.ones(2, 3)), expected)
    assert compiled.graphs == count > 0
