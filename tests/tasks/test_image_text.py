"""Conversations with images: formats of rows, labels, lengths, bad input, commands."""

from __future__ import annotations

import base64
import json
from importlib import import_module
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Florence2Config, PaliGemmaProcessor, Qwen2VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from rapidformer.accel.unpad.calls import Removal
from rapidformer.accel.unpad.unpadding import apply_unpadding
from rapidformer.cli.main import main
from rapidformer.compat.transformers_processors import (
    load_auto_processor,
    loading_without_torchvision,
)
from rapidformer.config import parse_arguments, resolve
from rapidformer.errors import ConfigurationError, DataError, ModelError
from rapidformer.models.plan import find_plan
from rapidformer.overlay import get_fact
from rapidformer.tasks.base import PreparedData
from rapidformer.tasks.chat.columns import ChatColumns
from rapidformer.tasks.image_text.conversations import MARK, read_conversation
from rapidformer.tasks.image_text.encoding import (
    AnswerCollator,
    ImageEncoder,
    ImageTemplate,
    Rendered,
)
from rapidformer.tasks.registry import get_task
from tests.tasks.image_text_rig import (
    FAMILIES,
    build_image,
    build_model,
    build_processor,
    build_rows,
    build_tokenizer,
    save_family,
)

_TURNS, _PAIR = (
    ChatColumns(messages="messages"),
    ChatColumns(prompt="prompt", response="completion"),
)
_PARTS = [{"type": "image"}, {"type": "text", "text": "what ?"}]
_READ = f"{MARK}what ?"


def _say(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content},
                         {"role": "assistant", "content": "red"}]}  # fmt: skip


def _encode(image: Any) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("row", "columns", "images"),
    [
        ({**_say(_PARTS), "images": ["a.png"]}, _TURNS, ["a.png"]),
        ({**_say(_PARTS), "images": "a.png"}, _TURNS, ["a.png"]),
        ({**_say("<image>what ?"), "images": ["a.png"]}, _TURNS, ["a.png"]),
        ({**_say("what ?"), "images": ["a.png"]}, _TURNS, ["a.png"]),
        (_say([{"type": "image", "path": "a.png", "text": None}, _PARTS[1]]), _TURNS, ["a.png"]),
        (_say([{"type": "image", "base64": "AA=="}, _PARTS[1]]), _TURNS, ["data:;base64,AA=="]),
        (
            _say([{"type": "image_url", "image_url": {"url": "http://a"}}, _PARTS[1]]), _TURNS,
            ["http://a"],
        ),
        ({"prompt": "<image>what ?", "completion": "red", "images": ["a.png"]}, _PAIR, ["a.png"]),
        (
            {
                "prompt": [{"role": "user", "content": _PARTS}],
                "completion": [{"role": "assistant", "content": "red"}], "images": ["a.png"],
            },
            _PAIR, ["a.png"],
        ),
    ],
)  # fmt: skip
def test_formats(row: dict[str, Any], columns: ChatColumns, images: list[Any]) -> None:
    conversation = read_conversation(row, columns, "images")
    assert [turn["content"] for turn in conversation.messages] == [_READ, "red"]
    assert conversation.images == images


def test_images_of_parts_and_of_the_column_are_shown_in_order() -> None:
    parts = [{"type": "image"}, {"type": "image", "url": "b.png"}, {"type": "image"}]
    row = {**_say(parts), "images": ["a.png", "c.png"]}
    assert read_conversation(row, _TURNS, "images").images == ["a.png", "b.png", "c.png"]
    text = read_conversation({**_say("hello"), "images": []}, _TURNS, "images")
    assert text.images == [] and text.messages[0]["content"] == "hello"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llava", tmp_path_factory.mktemp("image_text"))


def prepare(folder: Path, rows: Any, *flags: str) -> PreparedData:
    words = ["--task", "image_text", "--pretrained-model-name-or-path", str(folder), *flags]
    return get_task("image_text").prepare(parse_arguments(words), {"train": rows})


def _broken(folder: Path) -> str:
    path = folder / "broken.png"
    path.write_bytes(_encode(build_image("red"))[:20])
    return str(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {**_say(_PARTS), "images": ["/no/such.png"]},
            "row 2: there is no image file /no/such.png",
        ),
        ({**_say(_PARTS), "images": ["BROKEN"]}, "row 2: .*broken.png cannot be read as an image"),
        (
            {**_say("<image> <image> what ?"), "images": [build_image("red")]},
            "row 2: it names 2 places for images .*, but has 1 image to show there",
        ),
        ({**_say(_PARTS), "images": []}, "row 2: it names 1 place .*, but has no images"),
        ({**_say(_PARTS), "images": 7}, "row 2: it has a int instead of an image"),
        ({**_say(_PARTS), "images": [7]}, "row 2: an image must be a path, .* not a int"),
        (_say([{"type": "video", "path": "a.mp4"}]), "row 2: it has a part of type 'video'"),
        ({**_say(7)}, "row 2: it has a message whose content is neither text nor a list"),
        ({"messages": "what ?"}, "row 2: it must hold a list of messages, not a plain string"),
    ],
)
def test_bad_rows(row: dict[str, Any], message: str, folder: Path) -> None:
    if row.get("images") == ["BROKEN"]:
        row = {**row, "images": [_broken(folder)]}
    with pytest.raises(DataError, match=message) as caught:
        prepare(folder, [{**_say("what ?"), "images": []}, row])
    assert "\n" not in str(caught.value)


def test_rows_without_images_are_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare(folder, [_say("what ?")])
    assert "no row has an image and no column of them was found (--image-column)" in caplog.text
    with pytest.raises(DataError, match=r"no images to show there \(--image-column names the"):
        prepare(folder, [{**_say("<image>what ?"), "photos": ["a.png"]}])
    for row in ({"text": "what ?"}, {"label": 1}):
        with pytest.raises(
            DataError, match=f"needs conversations .* The data has {next(iter(row))}"
        ):
            prepare(folder, [row])


def test_a_truncated_image_is_reported_when_it_is_read(folder: Path) -> None:
    image = _encode(build_image("red", 40, 40))
    prepared = prepare(folder, [{**_say(_PARTS), "images": [image[: len(image) - 40]]}])
    assert prepared.train is not None
    with pytest.raises(DataError, match="train, row 1: the image cannot be read as an image"):
        prepared.train[0]


def test_images_of_every_kind_are_equal(folder: Path, tmp_path: Path) -> None:
    """Beside the data file, in memory, in base64, and in a table of `datasets`."""
    from datasets import Dataset, Features, Image, List, Value

    image = build_image("green")
    data = _encode(image)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(data)
    address = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    kinds = [image, data, {"bytes": data, "path": None}, address, "pictures/a.png"]
    rows = [{**_say(_PARTS), "images": [kind]} for kind in kinds]
    prepared = prepare(folder, rows, "--data-path", str(tmp_path / "train.jsonl"))
    table = Dataset.from_list(
        [{"prompt": "what ?", "completion": "red", "images": [{"bytes": data, "path": None}]}],
        features=Features(
            {"prompt": Value("string"), "completion": Value("string"), "images": List(Image())}
        ),
    )
    stored = prepare(folder, table)
    assert prepared.train is not None and stored.train is not None
    opened = [*(prepared.train[n]["images"][0] for n in range(5)), stored.train[0]["images"][0]]
    assert {one.tobytes() for one in opened} == {image.tobytes()}
    batch = prepared.collate([prepared.train[0], stored.train[0]])
    assert torch.equal(batch["input_ids"][0], batch["input_ids"][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_processor(family: str, tmp_path: Path) -> None:
    """Ids and lengths as transformers' own call; placeholders are never labels."""
    build_processor(family).save_pretrained(tmp_path)
    processor = load_auto_processor(str(tmp_path))
    assert processor.to_dict() == build_processor(family).to_dict()
    template = ImageTemplate(processor.tokenizer, {}, processor.image_token)
    encoder = ImageEncoder(processor, template, trains_on_prompts=True)
    chats = [read_conversation(row, _TURNS, "images") for row in build_rows(4)]
    rows = [{"conversation": chat, "images": chat.images} for chat in chats]
    batch = AnswerCollator(encoder, shows_images=True)(rows)
    rendered: Any = [encoder.render(chat) for chat in chats]
    counted = encoder.count_tokens(rendered, [[i.size for i in chat.images] for chat in chats])
    inserted = {
        int(token)
        for size in {image.size for chat in chats for image in chat.images}
        for token in processor.tokenizer(encoder._get_inserted(size))["input_ids"]
    }
    for number, row in enumerate(build_rows(4)):
        wanted = processor(
            text=[rendered[number].text], images=[row["images"]] if row["images"] else None
        )["input_ids"][0]
        size = int(batch["attention_mask"][number].sum())
        assert batch["input_ids"][number, :size].tolist() == list(wanted)
        labels = [label for label in batch["labels"][number].tolist() if label >= 0]
        assert counted[number] == (size, labels)
        assert inserted.isdisjoint(labels)
        assert len(labels) == size - 1 - sum(int(one) in inserted for one in wanted)


def test_a_decoder_of_its_own_is_refused(tmp_path: Path) -> None:
    Florence2Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="with a decoder of its own"):
        prepare(tmp_path, build_rows(1))


def test_batches_with_images_keep_their_padding() -> None:
    """Qwen3-VL adds what it sees between blocks, at the places that the padded mask has."""
    processor, model = build_processor("qwen3_vl"), build_model("qwen3_vl")
    processor.tokenizer.chat_template = processor.chat_template
    encoder = ImageEncoder(processor, ImageTemplate(processor.tokenizer, {}, processor.image_token))
    chats = [read_conversation(row, _TURNS, "images") for row in build_rows(4)]
    rows = [{"conversation": chat, "images": chat.images} for chat in chats]
    collate = AnswerCollator(encoder, shows_images=False)
    expected = model(**collate(rows)).loss
    assert apply_unpadding(model, find_plan(model)) is None
    assert model(**collate(rows)).loss == expected
    removal = get_fact(model, Removal)
    assert not removal.has_removed
    model(**collate(rows[2:]))
    assert removal.has_removed


def test_qwen2s_processor_needs_no_torchvision(tmp_path: Path) -> None:
    """Its video processor does, but is loaded and saved only."""
    before = build_processor("qwen3_vl")
    with loading_without_torchvision():
        videos_of = import_module("transformers.models.auto.video_processing_auto")
        kind = videos_of.video_processor_class_from_name("Qwen2VLVideoProcessor")
        videos = kind(patch_size=4)
        processor = Qwen2VLProcessor(before.image_processor, before.tokenizer, videos)
    processor.save_pretrained(tmp_path)
    loaded = load_auto_processor(str(tmp_path))
    assert type(loaded.video_processor).__name__ == "Qwen2VLVideoProcessor"
    assert loaded.video_processor.to_dict() == videos.to_dict()
    assert loaded(text=["<|image_pad|>"], images=[build_image("red")])["pixel_values"].any()


def test_a_processor_that_changes_the_text_is_refused() -> None:
    """PaliGemma's adds a first token behind the image, and a last one."""
    images = SiglipImageProcessorPil(size={"height": 8, "width": 8})
    images.image_seq_length = 4
    processor = PaliGemmaProcessor(images, build_tokenizer("llava"))
    with pytest.raises(ModelError, match="PaliGemmaProcessor changes the text"):
        ImageEncoder(processor, None).count_tokens([Rendered("<image>yes", [])], [[(8, 8)]])  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_blank_image_changes_no_loss(family: str, tmp_path: Path) -> None:
    """Batches without images run the tower on a blank one, after the end of a row."""
    prepared = prepare(save_family(family, tmp_path), build_rows(4))
    assert prepared.train is not None
    rows = [prepared.train[2], prepared.train[3]]
    shown = prepared.collate(rows)
    collate: Any = prepared.collate
    plain = type(collate)(collate.encoder, shows_images=False)(rows)
    assert "pixel_values" in shown and "pixel_values" not in plain
    model = build_model(family)
    losses = [model(**batch).loss.item() for batch in (shown, plain)]
    assert abs(losses[0] - losses[1]) < 1e-6


def test_rows_that_are_too_long_are_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = prepare(folder, build_rows(4), "--seq-length", "20")
    assert prepared.train is not None
    assert list(prepared.train.numbers) == [0, 2, 3]
    assert prepared.train["length"] == [20, 14, 8]
    text = "dropped 1 of 4 examples: longer than 20 tokens with the images, which cannot be cut"
    assert text in caplog.text


def test_a_template_for_text_alone(folder: Path) -> None:
    """The image's token stands in the text, where the image was."""
    template = "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + '<end>' }}{% endfor %}"
    prepared = prepare(folder, build_rows(1), "--chat-template", template, "--train-on-prompts")
    assert prepared.train is not None
    batch = prepared.collate([prepared.train[0]])
    assert (
        int((batch["input_ids"] == prepared.processor.convert_tokens_to_ids("<image>")).sum()) == 4
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--packing"], "--packing: --task image_text keeps each conversation in a row of its own"),
        (["--dynamic-shape", "on"], "--dynamic-shape on cannot be combined with --task image_text"),
        (["--context-parallel-size", "2"], "ranks would share the tokens of an image"),
        (["--pipeline-model-parallel-size", "2"], "stages exchange tokens, not images"),
        (["--tensor-model-parallel-size", "2"], "vision towers have no plan to split them"),
    ],
)
def test_what_images_exclude(flags: list[str], message: str) -> None:
    args = parse_arguments(["--task", "image_text", "--model-type", "llava", *flags])
    with pytest.raises(ConfigurationError, match=message):
        resolve(args, world_size=2)


def test_commands(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``data show`` joins placeholders; ``predict`` and a chat answer about pictures."""
    monkeypatch.chdir(tmp_path)
    build_image("red").save("a.png")
    row = {**_say("<image> what colour ?"), "images": ["a.png"]}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    model = ["--task", "image_text", "--pretrained-model-name-or-path", str(folder)]
    assert main(["data", "show", *model, "--data-path", "rows.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert "a.png, 20 x 16 pixels" in shown
    assert "<image x 4>" in shown
    assert "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET} red <end>" in shown
    short = ["--max-new-tokens", "3", "--device", "cpu"]
    assert main(["predict", *model, "--input", "what ?", "--image", "a.png", *short]) == 0
    asked = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["predict", *model, "--input", "rows.jsonl", *short]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["expected"] == "red"
    monkeypatch.setattr("sys.stdin", StringIO("what ?\n/image no.png\n/new\nwhat ?\n"))
    assert main(["predict", *model, "--chat", "--image", "a.png", *short]) == 0
    said = capsys.readouterr()
    assert [line.strip() for line in said.out.splitlines()] == [asked["generated"]] * 2
    assert "/image: there is no image file no.png" in said.err
