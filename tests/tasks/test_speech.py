from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path
from shutil import copy
from types import SimpleNamespace
from typing import Any

import jiwer
import numpy as np
import pytest
import soundfile
import torch
import transformers

from rapidformer.checkpoint.exporting import plain_process, proof
from rapidformer.checkpoint.exporting.export import export
from rapidformer.config import parse_arguments
from rapidformer.data.named_sets import NamedSet
from rapidformer.errors import ConfigurationError, DataError, ModelError
from rapidformer.tasks.metrics.generation import count_edits
from rapidformer.tasks.mixture import SetTallies, prepare_sets
from rapidformer.tasks.registry import get_task
from rapidformer.tasks.speech.audio import open_clip
from rapidformer.tasks.speech.losses import SEEDS
from rapidformer.tasks.speech.transcripts import WrittenTranscripts

from .conftest import compute_metrics, make_args, run_split, write_jsonl
from .speech_rig import RATE, make_ctc_model, make_rows, make_tones, make_whisper

RECOGNITION = get_task("speech_recognition")
CLASSIFICATION = get_task("audio_classification")


@pytest.fixture(scope="module")
def ctc_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ctc_model(tmp_path_factory.mktemp("ctc"), mask_time_prob=0.0)


@pytest.fixture(scope="module")
def whisper_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


def prepare(folder: Path, rows: Any, **settings: Any) -> Any:
    splits = rows if isinstance(rows, dict) else {"train": rows}
    return RECOGNITION.prepare(make_args(pretrained_model_name_or_path=folder, **settings), splits)


def compute_loss(prepared: Any, model: Any, rows: list[Any]) -> torch.Tensor:
    batch = prepared.collate(rows)
    terms = prepared.objective.compute(model, batch, None)
    loss: torch.Tensor = terms["loss"].mean
    return loss


# ---- reading audio -------------------------------------------------------------------------------


def test_audio_is_read_from_anything(tmp_path: Path) -> None:
    samples = make_tones("low mid", rate=8000)
    soundfile.write(tmp_path / "a.flac", np.stack([samples, 0 * samples], axis=1), 8000)
    pair = {"array": samples.tolist(), "sampling_rate": 8000}
    rows: list[dict[str, Any]] = [
        {"audio": "a.flac"},
        {"audio": {"path": "a.flac", "bytes": None}},
        {"audio": {"path": None, "bytes": (tmp_path / "a.flac").read_bytes()}},
        {"audio": pair},
        {"audio": samples, "sampling_rate": 8000},
        {"audio": np.stack([samples, samples]), "sample_rate": 8000},
        {"audio": (samples * 32767).astype(np.int16), "sampling_rate": 8000},
    ]
    for number, row in enumerate(rows):
        clip = open_clip(row, "audio", "row", [tmp_path])
        assert clip.measure() == (len(samples) / 8000, 8000)
        scale = 0.5 if number < 3 else 1.0  # one of both channels is silent
        assert np.abs(clip.decode(8000) - scale * samples).max() < 1e-4
    heard = open_clip(rows[3], "audio", "row").decode(RATE)
    assert heard.shape == (2 * len(samples),)
    spectrum = np.abs(np.fft.rfft(heard[: len(heard) // 3]))
    assert abs(np.argmax(spectrum) * RATE / (len(heard) // 3) - 300) < 10, "still the low tone"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no.wav", r"train, row 2: there is no audio file no\.wav"),
        ("broken.wav", r"train, row 2: .*broken\.wav cannot be read as audio \(Format not recog"),
        ("empty.wav", r"train, row 2: .*empty\.wav is empty"),
        (None, "train, row 2: there is no audio in audio"),
    ],
)
def test_bad_audio_names_its_row(
    value: str | None, reason: str, ctc_folder: Path, tmp_path: Path
) -> None:
    soundfile.write(tmp_path / "good.wav", make_tones("low"), RATE)
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), RATE)
    (tmp_path / "broken.wav").write_text("not a recording")
    rows = [{"audio": "good.wav", "text": "low"}, {"audio": value, "text": "low"}]
    data = write_jsonl(tmp_path / "train.jsonl", rows)
    with pytest.raises(DataError, match=reason):
        RECOGNITION.prepare(make_args(pretrained_model_name_or_path=ctc_folder, data_path=data))


def test_a_path_must_mean_one_file(tmp_path: Path) -> None:
    """Two data files, each with an a.wav beside it: neither may be taken for the other."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        soundfile.write(folder / "a.wav", make_tones("low"), RATE)
    with pytest.raises(DataError, match=r"train, row 1: a\.wav may be .*first/a\.wav or .*second"):
        open_clip({"audio": "a.wav"}, "audio", "train, row 1", folders)
    assert open_clip({"audio": "a.wav"}, "audio", "train, row 1", folders[:1] * 2).measure()


def test_samples_without_a_rate_are_refused(ctc_folder: Path) -> None:
    rows = [{"audio": np.zeros(4000), "text": "low"}]
    with pytest.raises(DataError, match="train, row 1: the samples in audio have no sampling rate"):
        prepare(ctc_folder, rows)
    rows = [{"audio": {"array": np.full(4000, np.nan), "sampling_rate": RATE}, "text": "low"}]
    with pytest.raises(DataError, match=r"train, row 1: .* no numbers"):
        prepare(ctc_folder, rows).train[0]


# ---- transcripts ---------------------------------------------------------------------------------


def test_whisper_labels(whisper_folder: Path) -> None:
    rows = make_rows(2)
    prepared = prepare(whisper_folder, rows, language="German")
    tokenizer = prepared.processor
    tokens = [
        tokenizer.convert_ids_to_tokens(row["labels"])
        for row in map(prepared.train.__getitem__, range(2))
    ]
    for row, ids in zip(rows, tokens, strict=True):
        assert ids[:3] == ["<|de|>", "<|transcribe|>", "<|notimestamps|>"]
        assert "".join(ids[3:-1]).replace("Ġ", " ") == row["text"]
        assert ids[-1] == tokenizer.eos_token == tokenizer.pad_token
    labels = prepared.collate([prepared.train[0], prepared.train[1]])["labels"]
    for row, ids in zip(labels, tokens, strict=True):
        assert (row != -100).sum() == len(ids), (
            "the end is a label, padding with the same id is not"
        )
    translated = prepare(whisper_folder, rows, language="de", speech_task="translate")
    assert "<|translate|>" in tokenizer.convert_ids_to_tokens(translated.train[0]["labels"])


def test_only_the_decoders_start_is_cut(whisper_folder: Path) -> None:
    """A tokenizer that puts another token first keeps it."""
    prepared = prepare(whisper_folder, make_rows(1), language="de")
    transcripts = prepared.extras["transcripts"]
    with_start = transcripts.encode(["low"], "train", 0)[0]
    transcripts._start = -1
    assert transcripts.encode(["low"], "train", 0)[0][1:] == with_start


@pytest.mark.parametrize("kind", ["speecht5", "joined"])
def test_lengths_of_other_decoders(kind: str) -> None:
    config: Any = transformers.SpeechT5Config(max_text_positions=30)
    if kind == "joined":
        config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.Wav2Vec2Config(), transformers.BertConfig(max_position_embeddings=30)
        )
        config.decoder_start_token_id = 1
    parts: Any = SimpleNamespace(config=config, args=SimpleNamespace(normalize_text=False))
    assert WrittenTranscripts(parts, None, None).most_tokens == 29


def test_language_is_needed_and_checked(whisper_folder: Path, ctc_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"knows many languages: .* --language german"):
        prepare(whisper_folder, make_rows(1))
    with pytest.raises(ConfigurationError, match=r"Whisper does not know it\. Did you mean"):
        prepare(whisper_folder, make_rows(1), language="germn")
    with pytest.raises(ConfigurationError, match="--language is for Whisper"):
        prepare(ctc_folder, make_rows(1), language="de")


def test_vocabulary_is_made_and_checked(ctc_folder: Path, caplog: Any) -> None:
    rows = make_rows(6)
    prepared = prepare(ctc_folder, {"train": rows, "validation": [{**rows[0], "text": "low!"}]})
    letters = sorted({letter for row in rows for letter in row["text"]} - {" "})
    assert list(prepared.processor.get_vocab())[:-2] == ["|", *letters]
    assert prepared.model_settings["pad_token_id"] == len(letters) + 2
    assert prepared.model_settings["vocab_size"] == len(letters) + 3
    assert "validation, row 1: the tokenizer does not know '!'" in caplog.text


def test_unknown_and_missing_characters(ctc_folder: Path, tmp_path: Path) -> None:
    rows = make_rows(4)
    prepared = prepare(ctc_folder, rows)
    folder = make_ctc_model(tmp_path)
    prepared.saved.save_pretrained(folder)
    with pytest.raises(
        DataError, match=r"train, row 2: the tokenizer does not know '!', 'q'\. --n"
    ):
        prepare(folder, [rows[0], {**rows[1], "text": "low q!"}])
    assert prepare(folder, [{**rows[0], "text": "LOW!"}], normalize_text=True)
    with pytest.raises(DataError, match="train, row 2: the transcript in text is empty"):
        prepare(ctc_folder, [rows[0], {**rows[1], "text": " "}])
    with pytest.raises(
        DataError, match="train, row 2: the column text must hold text, not nothing"
    ):
        prepare(ctc_folder, [rows[0], {**rows[1], "text": None}])


def test_what_cannot_be_learnt_is_left_out(
    whisper_folder: Path, ctc_folder: Path, caplog: Any
) -> None:
    rows = make_rows(3)
    long = {"audio": {"array": make_tones("low " * 8), "sampling_rate": RATE}, "text": "low"}
    prepared = prepare(whisper_folder, [rows[0], long, rows[1]], language="de")
    assert len(prepared.train) == 2
    assert "train: 1 row of 3 left out: longer than 1 s (the first is row 2)" in caplog.text
    kept = [prepared.train.read(number, "text") for number in range(2)]
    assert kept == [rows[0]["text"], rows[1]["text"]]
    spoken = {**rows[0], "text": "low mid high " * 10}
    assert len(prepare(ctc_folder, [spoken, rows[1]]).train) == 1
    assert "more characters than the model makes steps" in caplog.text
    with pytest.raises(DataError, match="train: no row is left: longer than 1 s"):
        prepare(whisper_folder, [long], language="de")


# ---- losses --------------------------------------------------------------------------------------


def compare_with_script(prepared: Any, folder: Path, rows: list[Any], theirs: Any) -> None:
    """Loss and gradients against the batch and the model of transformers' example scripts."""
    args = make_args(pretrained_model_name_or_path=folder, language=None)
    models = [RECOGNITION.build_model(args, prepared).train() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())  # the head is new
    for model in models:
        model.requires_grad_(True)
    ours = compute_loss(prepared, models[0], [prepared.train[n] for n in range(len(rows))])
    theirs = models[1](**theirs).loss
    assert torch.allclose(ours, theirs, rtol=1e-6)
    ours.backward()
    theirs.backward()
    for (name, mine), wanted in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        if wanted.grad is not None or mine.grad is not None:
            assert torch.allclose(mine.grad, wanted.grad, atol=1e-6, rtol=1e-5), name


def test_ctc_loss_is_that_of_the_script(ctc_folder: Path) -> None:
    """As run_speech_recognition_ctc.py pads, with ctc_loss_reduction="mean"."""
    rows = make_rows(4)
    prepared = prepare(ctc_folder, rows)
    processor = prepared.saved
    features = [
        {
            "input_values": processor.feature_extractor(r["audio"]["array"], sampling_rate=RATE)[
                "input_values"
            ][0]
        }
        for r in rows
    ]
    batch = processor.feature_extractor.pad(features, padding=True, return_tensors="pt")
    ids = [{"input_ids": processor.tokenizer(row["text"]).input_ids} for row in rows]
    padded = processor.tokenizer.pad(ids, padding=True, return_tensors="pt")
    batch["labels"] = padded["input_ids"].masked_fill(padded.attention_mask.ne(1), -100)
    prepared.model_settings["ctc_loss_reduction"] = "mean"
    compare_with_script(prepared, ctc_folder, rows, batch)


def test_whisper_loss_is_that_of_the_script(whisper_folder: Path) -> None:
    """As run_speech_recognition_seq2seq.py pads, and cuts the decoder's start."""
    rows = make_rows(4)
    prepared = prepare(whisper_folder, rows, language="de")
    extractor, tokenizer = prepared.saved.feature_extractor, prepared.processor
    features = [
        {"input_features": extractor(r["audio"]["array"], sampling_rate=RATE)["input_features"][0]}
        for r in rows
    ]
    batch = extractor.pad(features, return_tensors="pt")
    ids = [{"input_ids": tokenizer(row["text"]).input_ids} for row in rows]
    padded = tokenizer.pad(ids, return_tensors="pt")
    labels = padded["input_ids"].masked_fill(padded.attention_mask.ne(1), -100)
    assert (labels[:, 0] == tokenizer.convert_tokens_to_ids("<|startoftranscript|>")).all()
    compare_with_script(prepared, whisper_folder, rows, {**batch, "labels": labels[:, 1:]})


@pytest.mark.parametrize("kind", ["wav2vec2", "hubert"])
def test_masks_belong_to_samples(kind: str, tmp_path: Path) -> None:
    """A row is masked as transformers masks it alone; afterwards, all is as it was.

    HuBERT does not tell which steps are padding.
    """
    modeling = import_module(f"transformers.models.{kind}.modeling_{kind}")
    folder = make_ctc_model(tmp_path, kind, mask_time_prob=0.5, mask_time_length=2)
    rows = make_rows(3)
    prepared = prepare(folder, rows)
    args = make_args(pretrained_model_name_or_path=folder)
    model = RECOGNITION.build_model(args, prepared).train()
    batch = prepared.collate([prepared.train[n] for n in range(3)])
    original, before = modeling._compute_mask_indices, np.random.get_state()[1].tolist()
    whole = prepared.objective.compute(model, batch, None)["loss"].mean
    again = prepared.objective.compute(model, batch, None)["loss"].mean
    assert torch.equal(whole, again)
    alone = []
    for row in range(3):
        part = prepared.collate([prepared.train[row]])
        part[SEEDS] = batch[SEEDS][row : row + 1]
        alone.append(prepared.objective.compute(model, part, None)["loss"].mean.item())
    assert abs(whole.item() - sum(alone) / 3) < 1e-5
    batch[SEEDS] = batch[SEEDS] + 1
    assert prepared.objective.compute(model, batch, None)["loss"].mean != whole
    assert modeling._compute_mask_indices is original
    assert np.random.get_state()[1].tolist() == before


# ---- scores and predictions ----------------------------------------------------------------------


def test_edits_are_jiwers() -> None:
    dice = np.random.default_rng(0)
    pairs = [
        tuple(" ".join(dice.choice([*"abc", "dd"], size=size)) for size in dice.integers(1, 9, 2))
        for _ in range(60)
    ]
    heard, said = map(list, zip(*pairs, strict=True))
    words = sum(count_edits(a.split(), b.split()) for a, b in pairs)
    letters = sum(count_edits(a, b) for a, b in pairs)
    assert words / sum(len(text.split()) for text in said) == jiwer.wer(said, heard)
    assert letters / sum(map(len, said)) == jiwer.cer(said, heard)
    assert count_edits("", "abc") == count_edits("abc", "") == 3


@pytest.mark.parametrize("kind", ["ctc", "whisper"])
def test_evaluation_equals_jiwer(kind: str, ctc_folder: Path, whisper_folder: Path) -> None:
    folder, more = (ctc_folder, {}) if kind == "ctc" else (whisper_folder, {"language": "de"})
    rows = make_rows(5)
    prepared = prepare(folder, {"train": rows, "validation": rows}, max_new_tokens=5, **more)
    args = make_args(pretrained_model_name_or_path=folder, **more)
    model = RECOGNITION.build_model(args, prepared)
    records = run_split(RECOGNITION, model, prepared, "validation", 2)
    metrics = compute_metrics(RECOGNITION, records, prepared, "validation")
    decode = prepared.extras["transcripts"].decode
    heard, said = [decode(r["transcript"]) for r in records], [row["text"] for row in rows]
    assert metrics["wer"] == jiwer.wer(said, heard)
    assert metrics["cer"] == jiwer.cer(said, [" ".join(text.split()) for text in heard])
    single = run_split(RECOGNITION, model, prepared, "validation", 1)
    assert [decode(r["transcript"]) for r in single] == heard, "padding is not heard"
    batch = prepared.collate([prepared.validation[n] for n in range(5)])
    loss = prepared.objective.compute(model, batch, None)["loss"].mean
    assert abs(metrics["loss"] - loss.item()) < 1e-4


def compute_plainly(folder: Path, rows: plain_process.Rows) -> dict[str, torch.Tensor]:
    """The proof of an export without a new process, which would import transformers again."""
    return plain_process.compute_outputs(plain_process.load_model(folder), rows)


def test_export_is_the_whole_model(
    whisper_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_compute_plainly", compute_plainly)
    export(whisper_folder, tmp_path / "out")
    auto = transformers.AutoModelForSpeechSeq2Seq
    model, exported = (auto.from_pretrained(f).eval() for f in (whisper_folder, tmp_path / "out"))
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    inputs = processor(make_tones("low mid"), sampling_rate=RATE, return_tensors="pt")
    ids = torch.tensor([processor.tokenizer("low mid").input_ids])
    logits = [m(**inputs, decoder_input_ids=ids).logits for m in (model, exported)]
    assert torch.equal(*logits)
    config = exported.generation_config
    assert config.is_multilingual and config.lang_to_id == model.generation_config.lang_to_id


def test_export_needs_a_feature_extractor(
    ctc_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nobody knows what the model would hear."""
    monkeypatch.setattr(proof, "_compute_plainly", compute_plainly)
    for name in ("config.json", "model.safetensors"):
        copy(ctc_folder / name, tmp_path)
    with pytest.raises(ModelError, match="no feature extractor that reads audio for Wav2Vec2ForC"):
        export(tmp_path, tmp_path / "out")


def test_whisper_hears_long_recordings_in_windows(whisper_folder: Path) -> None:
    samples = make_tones("low mid high low mid high low mid")  # 1.2 s
    args = make_args(pretrained_model_name_or_path=whisper_folder, language="de", max_new_tokens=3)
    row = {"audio": {"array": samples, "sampling_rate": RATE}}
    prepared = RECOGNITION.prepare_for_prediction(args, [row, row])
    assert RECOGNITION.count_features(prepared) == [2, 2]
    model = RECOGNITION.build_model(args, prepared)
    records = run_split(RECOGNITION, model, prepared, "test")
    answers = RECOGNITION.predictions(records, prepared, "test")
    pieces = [prepared.extras["transcripts"].decode(r["transcript"]) for r in records]
    assert [a["text"] for a in answers] == [" ".join(filter(None, pieces[:2]))] * 2
    extract = prepared.saved.feature_extractor
    second = extract(samples[RATE:], sampling_rate=RATE)["input_features"][0]
    assert np.array_equal(prepared.test[1]["input_features"], second)


# ---- classes -------------------------------------------------------------------------------------


def test_classes_from_folders(ctc_folder: Path, tmp_path: Path) -> None:
    for split, count in (("train", 3), ("validation", 1)):
        for word in ("low", "high"):
            (tmp_path / split / word).mkdir(parents=True)
            for number in range(count):
                samples = make_tones(" ".join([word] * (number + 1)))
                soundfile.write(tmp_path / split / word / f"{number}.wav", samples, RATE)
    args = make_args(pretrained_model_name_or_path=ctc_folder, data_path=tmp_path)
    prepared = CLASSIFICATION.prepare(args)
    assert prepared.extras["names"] == ("high", "low")
    assert [prepared.train[n]["labels"] for n in range(6)] == [0, 0, 0, 1, 1, 1]
    model = CLASSIFICATION.build_model(args, prepared)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen and all("feature_extractor" in name for name in frozen)
    records = run_split(CLASSIFICATION, model, prepared, "validation")
    assert "accuracy" in compute_metrics(CLASSIFICATION, records, prepared, "validation")
    names = [a["audio"] for a in CLASSIFICATION.predictions(records, prepared, "validation")]
    assert [Path(name).parent.name for name in names] == ["high", "low"]


def test_a_whisper_classifies_without_its_decoder(whisper_folder: Path) -> None:
    rows = [{"audio": row["audio"], "label": row["text"][:3]} for row in make_rows(4)]
    args = make_args(pretrained_model_name_or_path=whisper_folder)
    model = CLASSIFICATION.build_model(args, CLASSIFICATION.prepare(args, {"train": rows}))
    own = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(whisper_folder).model.encoder
    mine = dict(model.encoder.state_dict())
    assert all(torch.equal(mine[name], weight) for name, weight in own.state_dict().items())


def test_metadata_next_to_recordings(ctc_folder: Path, tmp_path: Path) -> None:
    """An audiofolder: splits with a metadata.csv, whose paths begin there."""
    for split in ("train", "validation"):
        (tmp_path / split / "clips").mkdir(parents=True)
        soundfile.write(tmp_path / split / "clips" / "a.wav", make_tones("low"), 8000)
        with (tmp_path / split / "metadata.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("file_name", "sentence"), ("clips/a.wav", split)])
    args = make_args(pretrained_model_name_or_path=ctc_folder, data_path=tmp_path)
    prepared = RECOGNITION.prepare(args)
    assert prepared.train.describe(0).startswith("clips/a.wav: 0.30 s at 8,000 Hz, resampled")
    assert prepared.validation.read(0, "text") == "validation"
    assert prepared.train["length"] == [4800]


def test_error_rates_of_a_mixture_are_those_of_its_sets(whisper_folder: Path) -> None:
    model = f"--pretrained-model-name-or-path {whisper_folder} --language english"
    args = parse_arguments(f"--task speech_recognition {model}".split())
    sizes = {"a": 3, "b": 2}
    tables = {
        name: {"train": make_rows(2), "validation": make_rows(n)} for name, n in sizes.items()
    }
    sets = [NamedSet(label=name, path=name) for name in sizes]
    prepared = prepare_sets(RECOGNITION, args, sets, tables)
    tallies = SetTallies(RECOGNITION, prepared, "validation")
    for name, part in tallies.parts.items():
        rows: Any = part.validation
        for row in rows:
            said = row["labels"] if name == "a" else row["labels"][:0]
            tallies.update(name, [{"loss": 1.0, "count": 1, "transcript": said}])
    scores = tallies.compute()
    assert (scores["a_wer"], scores["b_wer"], scores["wer"]) == (0.0, 1.0, 0.4)
