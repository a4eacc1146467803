"""torch.compile block by block: equal results, no other names, one graph for equal blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rapidformer.accel.compile import apply_compile
from rapidformer.log import configure_logging, warn_once
from rapidformer.models.plan import find_plan

from .models import get_gradients, get_loss, make

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "backend"),
    [("bert", "eager"), ("bert", "aot_eager"), ("llama", "eager"), ("custom", "eager")],
)
def test_loss_and_gradients_are_equal(family: str, backend: str) -> None:
    model = make(family)
    loss, expected = get_loss(model, family), get_gradients(model, family)
    apply_compile(model, find_plan(model), backend=backend)
    assert torch.equal(get_loss(model, family), loss)
    for name, value in get_gradients(model, family).items():
        assert torch.equal(value, expected[name]), name


def test_names_and_classes_stay() -> None:
    model = make("bert")
    names, cls = list(model.state_dict()), type(model)
    apply_compile(model, find_plan(model), backend="eager")
    assert list(model.state_dict()) == names
    assert type(model) is cls


def collect_graphs(family: str) -> list[torch.fx.GraphModule]:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    model = make(family)
    apply_compile(model, find_plan(model), backend=backend)  # type: ignore[arg-type]
    get_loss(model, family)
    return graphs


def test_blocks_share_one_graph_and_nothing_else_is_compiled() -> None:
    (graph,) = collect_graphs("bert")
    text = graph.print_readable(print_output=False)
    assert "scaled_dot_product_attention" in text
    assert "embedding" not in text
    assert "cross_entropy" not in text


def test_blocks_that_are_torchs_own_layers_are_compiled_too() -> None:
    """torch skips frames of torch.nn: `nn.TransformerEncoderLayer.compile()` compiles nothing."""
    assert len(collect_graphs("custom")) == 1


def test_model_without_blocks_is_compiled_whole_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warn_once.cache_clear()
    configure_logging("info")
    model = nn.Linear(2, 2)
    expected = model(torch.ones(1, 2))
    apply_compile(model, find_plan(model), backend="eager")
    assert torch.equal(model(torch.ones(1, 2)), expected)
    assert "no repeated blocks were found in Linear" in capsys.readouterr().err
