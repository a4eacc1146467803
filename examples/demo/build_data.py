"""Build the demo's data and model folder from this machine's Python standard library.

The model's task: what is this function about? Every Python installation has thousands of functions
whose topic is known from the module they stand in, so the demo downloads nothing. It builds:

    data/{train,validation,test}.jsonl   text (the source of a function) and label (its topic)
    model/                               a tokenizer and the configuration of a small ModernBERT

The answer is not in the text: names of modules and topics are replaced by ``_`` everywhere, and no
function is in two splits. Longer functions are several training rows, each starting further down.

    python build_data.py OUTPUT
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
import sysconfig
import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 1234
SPLITS = ("train", "validation", "test")
# Modules of every Python from 3.11 on; an underscore before a name is where its source stands.
TOPICS = {
    "async": ("asyncio", "selectors"),
    "dates": ("datetime", "_pydatetime", "calendar", "_strptime", "zoneinfo"),
    "email": ("email", "mailbox"),
    "files": (
        "bz2", "filecmp", "fileinput", "fnmatch", "genericpath", "glob", "gzip", "lzma", "ntpath",
        "os", "pathlib", "posixpath", "_pyio", "shutil", "stat", "tarfile", "tempfile", "zipfile",
    ),
    "markup": ("html", "xml"),
    "numbers": (
        "colorsys", "decimal", "_pydecimal", "fractions", "numbers", "random", "statistics",
    ),
    "testing": ("doctest", "unittest"),
}  # fmt: skip
MODULES = {module: topic for topic, modules in TOPICS.items() for module in modules}
HIDDEN = re.compile(rf"\b({'|'.join(sorted({*TOPICS, *MODULES}, key=len, reverse=True))})\b")
FEWEST_LINES = 3
LINES_PER_ROW = 8

VOCAB_SIZE = 6000
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# One layer and the mean over all tokens: a topic is in the words, hardly in their order, and a
# minute on two slow cores is enough for such a model.
MODEL = {
    "model_type": "modernbert",
    "architectures": ["ModernBertForSequenceClassification"],
    "hidden_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 192,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "embedding_dropout": 0.2,
    "classifier_pooling": "mean",
    "pad_token_id": SPECIAL_TOKENS.index("[PAD]"),
    "bos_token_id": SPECIAL_TOKENS.index("[CLS]"),
    "cls_token_id": SPECIAL_TOKENS.index("[CLS]"),
    "eos_token_id": SPECIAL_TOKENS.index("[SEP]"),
    "sep_token_id": SPECIAL_TOKENS.index("[SEP]"),
}
TOKENIZER_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 128,
    "model_input_names": ["input_ids", "attention_mask"],
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Function:
    """One function or method of the standard library."""

    topic: str
    module: str
    name: str
    lines: tuple[str, ...]

    def build_row(self, first_line: int = 0) -> Row:
        """What the model sees: the class, if there is one, and the source from a line on."""
        text = "\n".join(self.lines[first_line:])
        if owner := self.name.rpartition(".")[0]:
            text = f"class {owner}:\n{textwrap.indent(text, '    ')}"
        origin = f"{self.module}:{self.name}"
        return {"text": HIDDEN.sub("_", text), "label": self.topic, "function": origin}


def find_sources(limit: int | None = None) -> list[Path]:
    """Files of the topics' modules, in the same order everywhere; ``limit`` takes a sample."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for module in MODULES:
        single = root / f"{module}.py"
        files += [single] if single.exists() else sorted((root / module).rglob("*.py"))
    files = [path for path in files if "test" not in path.parts and "tests" not in path.parts]
    return files if limit is None else files[:: max(1, len(files) // limit)][:limit]


def read_functions(limit: int | None = None) -> list[Function]:
    """All functions and methods of some length; the same source twice counts once."""
    root = Path(sysconfig.get_paths()["stdlib"])
    functions: dict[tuple[str, ...], Function] = {}
    for path in find_sources(limit):
        module = path.relative_to(root).as_posix()
        topic = MODULES[module.partition("/")[0].removesuffix(".py")]
        text = path.read_text(encoding="utf-8", errors="replace")
        source = text.splitlines()
        for name, node in _walk(ast.parse(text).body, ""):
            lines = "\n".join(source[node.lineno - 1 : node.end_lineno])
            code = tuple(line for line in textwrap.dedent(lines).splitlines() if line.strip())
            if len(code) >= FEWEST_LINES:
                made = Function(topic=topic, module=module, name=name, lines=code)
                functions.setdefault(code, made)
    return list(functions.values())


def _walk(
    body: list[ast.stmt], owner: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Not into functions: one inside another is part of its text, and must share its split."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _walk(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner + node.name, node


def get_split(function: Function) -> str:
    """Chosen by the function's name: independent of other functions, and of the seed."""
    name = f"{function.module}:{function.name}"
    place = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 8
    return {0: "test", 1: "validation"}.get(place, "train")


def build_splits(functions: list[Function], seed: int = SEED) -> dict[str, list[Row]]:
    """The rows of each split, shuffled. Only training rows start in the middle of a function."""
    rows: dict[str, list[Row]] = {split: [] for split in SPLITS}
    for function in functions:
        split = get_split(function)
        end = len(function.lines) - LINES_PER_ROW // 2 if split == "train" else 1
        starts = range(0, max(1, end), LINES_PER_ROW)
        rows[split] += [function.build_row(start) for start in starts]
    for split in SPLITS:
        random.Random(f"{seed} {split}").shuffle(rows[split])
    return rows


def train_tokenizer(texts: Iterable[str], folder: Path) -> int:
    """Byte-pair encoding of lower-cased words; get_URL and getUrl are the same two words."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    # Lower-casing loses the case, so split words at their capitals first.
    parting = Regex(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(parting, " "), normalizers.Lowercase()]
    )
    letters = Regex(r"[^\W_\d]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(letters, behavior="removed", invert=True)
    tokenizer.train_from_iterator(
        texts,
        BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL_TOKENS), show_progress=False),
    )
    begin, end = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", begin), ("[SEP]", end)],
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(TOKENIZER_SETTINGS, folder / "tokenizer_config.json")
    return int(tokenizer.get_vocab_size())


def write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_lines(rows: Iterable[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def build_demo(output: Path, limit: int | None = None, seed: int = SEED) -> dict[str, Any]:
    """Build everything under ``output``; returns the counts for the summary."""
    functions = read_functions(limit)
    splits = build_splits(functions, seed)
    for split, rows in splits.items():
        write_lines(rows, output / "data" / f"{split}.jsonl")
    size = train_tokenizer((row["text"] for row in splits["train"]), output / "model")
    write_json(MODEL | {"vocab_size": size}, output / "model" / "config.json")
    return {
        "functions": len(functions),
        "topics": len({function.topic for function in functions}),
        **{f"{split} rows": len(rows) for split, rows in splits.items()},
        "vocabulary": size,
    }


def show_summary(made: dict[str, Any], seconds: float, output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Python's own library ({seconds:.1f} s)")
    table.add_column("what")
    table.add_column("count", justify="right")
    for name, count in made.items():
        table.add_row(name, f"{count:,}")
    console = Console()
    console.print(table)
    console.print(f"written to {output}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Build the demo's data from Python's standard library."
    )
    parser.add_argument("output", type=Path, help="folder to write to")
    parser.add_argument("--limit", type=int, help="read at most this many source files")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    start = time.perf_counter()
    made = build_demo(arguments.output, arguments.limit, arguments.seed)
    show_summary(made, time.perf_counter() - start, arguments.output)


if __name__ == "__main__":
    main()
