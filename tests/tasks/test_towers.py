"""Text for models that see: what is saved is the whole model, and sees as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from rapidformer.config import Settings
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import DataError
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.runner import TaskFinetuner
from tests.parity.seeing import IMAGE, build_images, build_seeing
from tests.tasks.conftest import write_jsonl

PROCESSOR = b'{"processor_class": "SomeProcessor",  "image_processor": {"size": 8}}\n'


def make_checkpoint(kind: str, folder: Path) -> None:
    torch.manual_seed(0)
    model: Any = build_seeing(kind)
    with torch.no_grad():
        for parameter in model.parameters():  # Gemma 3 starts with a projector of zeros
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, IMAGE))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    (folder / "processor_config.json").write_bytes(PROCESSOR)


def train(kind: str, folder: Path, **more: Any) -> Any:
    """Two steps on text; the trained model, plain again."""
    make_checkpoint(kind, folder / "base")
    rows = [{"prompt": f"w{n} w5", "response": f"w{n + 1} w6"} for n in range(4, 12)]
    write_jsonl(folder / "data" / "train.jsonl", rows)
    engine = RapidformerEngine(
        args={
            "task": "causal_lm", "pretrained_model_name_or_path": str(folder / "base"),
            "data_path": str(folder / "data"), "train_iters": 2, "micro_batch_size": 4,
            "lr": 0.01, "weight_decay": 0.1, "save": str(folder / "run"), "log_level": "error",
            "progress": False, **more,
        }
    )  # fmt: skip
    TaskFinetuner(engine, get_task("causal_lm")).train()
    model: Any = engine.model.module
    states = {id(p) for group in engine.updates.optimizer.param_groups for p in group["params"]}
    assert states == {id(p) for p in model.parameters() if p.requires_grad}
    engine.close()
    return model.eval()


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "gemma3", "smolvlm", "llava", "mistral3"])
def test_the_saved_model_is_whole(kind: str, tmp_path: Path) -> None:
    model = train(kind, tmp_path)
    last = tmp_path / "run" / "last"
    saved, report = AutoModelForImageTextToText.from_pretrained(last, output_loading_info=True)
    assert not any(report.values())
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "base").state_dict()
    for name, weight in saved.state_dict().items():
        is_seeing = any(word in name for word in ("visual", "vision", "projector", "connector"))
        assert torch.equal(weight, before[name]) == is_seeing, name
    image, text = build_images(kind), {"input_ids": torch.tensor([[4, 5, 6, 7]])}
    other = {**image, "pixel_values": image["pixel_values"].flip(-1)}
    with torch.no_grad():
        for row in (image, text):
            torch.testing.assert_close(saved(**row).logits, model(**row).logits, rtol=0, atol=0)
        assert not torch.equal(saved(**image).logits, saved(**other).logits)
    assert (last / "processor_config.json").read_bytes() == PROCESSOR


def test_plain_peft_loads_the_adapter_on_the_whole_model(tmp_path: Path) -> None:
    from peft import PeftModel

    model = train("qwen3_5", tmp_path, lora_rank=2, lora_target_modules=["all-linear"])
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    saved = PeftModel.from_pretrained(base, str(tmp_path / "run" / "last")).eval()
    image = build_images("qwen3_5")
    with torch.no_grad():
        torch.testing.assert_close(saved(**image).logits, model(**image).logits, rtol=0, atol=1e-6)
    assert not any(
        "lora" in name for name, _ in saved.get_base_model().model.visual.named_modules()
    )
    assert (tmp_path / "run" / "last" / "processor_config.json").read_bytes() == PROCESSOR


# SmolVLM's, with its tokens replaced: a message is a list of parts.
_PARTS = (
    "{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]"
    "['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' "
    "}}{% endif %}{% endfor %}</s>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}"
    "{% endif %}"
)


def describe(folder: Path, task: str) -> Settings:
    return Settings(task=task, pretrained_model_name_or_path=str(folder), chat_template=_PARTS)


def prepare(folder: Path, task: str, rows: list[dict[str, Any]]) -> Any:
    return get_task(task).prepare(describe(folder, task), {"train": rows})


def test_text_and_images_in_rows(tmp_path: Path) -> None:
    """Text is shown as parts to a template that takes nothing else; images are not dropped."""
    make_checkpoint("llava", tmp_path)
    row = {"prompt": "w4 w5", "response": "w6 w7"}
    prepared = prepare(tmp_path, "causal_lm", [{**row, "images": []}])
    labels = [label for label in prepared.train[0]["labels"] if label >= 0]
    assert labels == [6, 7, 2]
    seen = [{**row, "images": []}, {**row, "images": ["a.png"]}]
    with pytest.raises(DataError, match=r"row 2: it has images .* causal_lm reads text alone"):
        prepare(tmp_path, "causal_lm", seen)
    with pytest.raises(DataError, match=r"input, row 1: it has images"):
        get_task("causal_lm").prepare_for_prediction(describe(tmp_path, "causal_lm"), seen[1:])
    pair = {"prompt": "w4", "chosen": "w5", "rejected": "w6", "image": b"\x89PNG"}
    with pytest.raises(DataError, match=r"row 1: .*column image\), and --task preference reads"):
        prepare(tmp_path, "preference", [pair])
