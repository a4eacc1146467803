"""Small vocabularies on disk, as a user would have them, and texts that try tokenizers hard."""
# ruff: noqa: RUF001  (the look-alikes are meant)

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "Hello world, this isn't 'quoted' — it's 42% of $3.50!",
    "def f(x):\n    return  x ** 2\t# tabs\r\n\n\nclass A: pass",
    "Ünïcödé naïve façade ÀÉÎ Straße İstanbul Ωmega ŉ",
    "中文字符 and カタカナ と 한글 mixed。Yes！",
    "emoji 🙂👩\u200d💻 and \u00a0no-break\u3000ideographic spaces",
    "zero\u200bwidth \ufeffmark \x00null \x1cfile separator \x7f delete",
    "we'll they've I'd you're he's don't 'em 's 't",
    "123 4567 ½ Ⅷ ٣٤ x² 1,000.50",
    "    leading and trailing    ",
    "a" * 90 + " " + "b-" * 60,
    "全部都是汉字没有空格，这样的句子很长很长很长很长。" * 3,
    "\n\n\n",
    "",
]


def get_library_sources(count: int, seed: int = 0) -> list[str]:
    """Sources of Python's standard library: real text, and the same on every machine of a kind."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(root.glob("*.py")) if path.stat().st_size < 60_000]
    return [
        path.read_text(encoding="utf-8", errors="replace")
        for path in random.Random(seed).sample(paths, count)
    ]


def make_gpt2_files(folder: Path, vocab_size: int = 2000) -> tuple[Path, Path]:
    """vocab.json and merges.txt of a byte-level BPE.

    It has merges of odd characters too: without them a text cut at a wrong place has the same ids.
    """
    from tokenizers import ByteLevelBPETokenizer

    dice = random.Random(0)
    odd = [make_random_text(dice, 25) for _ in range(1500)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        get_library_sources(12) + TEXTS + odd,
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_model(str(folder))
    return folder / "vocab.json", folder / "merges.txt"


def make_bert_file(folder: Path, vocab_size: int = 1200) -> Path:
    """vocab.txt of a WordPiece with cased and lower-cased pieces."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    texts = get_library_sources(12) + TEXTS
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(
        texts + [text.lower() for text in texts],
        trainer,
    )
    vocab = tokenizer.get_vocab()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "vocab.txt"
    path.write_text("".join(f"{t}\n" for t in sorted(vocab, key=vocab.__getitem__)), "utf-8")
    return path


def make_sentence_piece_file(folder: Path) -> Path:
    """A SentencePiece model without a padding token of its own."""
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(get_library_sources(3)).splitlines()),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        minloglevel=2,
        num_threads=1,
    )
    return folder / "tokenizer.model"


def write_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def make_random_text(dice: random.Random, length: int) -> str:
    """Characters of all kinds, those that tokenizers stumble over above all."""
    odd = [
        *"  \t\n\r\x0b\x0c\x00\x1c\x7f\x85\xa0\u1680\u2003\u2028\u3000\u180e\u200b\ufeff''abXY019.",
        *'-_!"$é\u0301ñ中文，カ한Σσ٣½🙂\u200dİß',
        *["'s", "'ll", " the", "self"],
    ]
    ranges = [(0x20, 0x3000), (0x3000, 0xD800), (0xE000, 0x11000), (0x10000, 0x110000)]
    return "".join(
        dice.choice(odd) if dice.random() < 0.9 else chr(dice.randrange(*dice.choice(ranges)))
        for _ in range(length)
    )
