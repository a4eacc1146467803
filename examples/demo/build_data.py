"""Build the demo's data and model folder from this machine's Python standard library.

The model's task: does this docstring belong to this function? Every Python installation has
thousands of examples, so the demo downloads nothing. It builds:

    data/{train,validation,test}.jsonl   pairs: sentence1, sentence2, label (and their origin)
    corpus.jsonl                         text of the training modules, for language models
    model/                               a tokenizer and the configuration of a small ModernBERT

Neither sentence alone may reveal the label. So in every round each function appears once with its
own docstring and once with another's, and each docstring (apart from name clashes) once with its
own function and once with another. The splits are divided by module, not by function.

    python build_data.py OUTPUT
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import keyword
import random
import re
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 1234
SPLITS = ("train", "validation", "test")
TRAIN_ROUNDS = 3
VOCAB_SIZE = 1500
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "ensurepip", "idle_test", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
# Words that occur in every function say nothing about any one of them.
COMMON_NAMES = {*keyword.kwlist, *keyword.softkwlist, "self", "cls"}
IDENTIFIER = re.compile(r"[^\W\d]\w+")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
SHORTEST_DOCSTRING = 3
LONGEST_DOCSTRING = 16
MOST_NAMES = 8
LINES_TO_CUT = 4

# One wide layer with one head, and the mean over all tokens as the answer. The task is to find
# equal words on both sides, and a newly initialized model learns that within a minute only if the
# path is short. Measured in that time: two layers with two heads stay near 0.64, and a BERT, which
# answers from the state of its first token, near chance.
MODEL = {
    "model_type": "modernbert",
    "architectures": ["ModernBertForSequenceClassification"],
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
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
    """One function of the standard library."""

    module: str
    name: str
    signature: str
    body: tuple[str, ...]
    docstring: str

    @property
    def label_name(self) -> str:
        return f"{self.module}:{self.name}"


def find_sources(limit: int | None = None) -> list[Path]:
    """The standard library's files, in the same order everywhere; ``limit`` takes a sample."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in root.rglob("*.py")
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    )
    return files if limit is None else files[:: max(1, len(files) // limit)][:limit]


def read_functions(limit: int | None = None) -> list[Function]:
    """All functions; repeated docstrings are dropped, so that none occurs in two splits."""
    root = Path(sysconfig.get_paths()["stdlib"])
    functions: list[Function] = []
    known: set[str] = set()
    for path in find_sources(limit):
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue  # some files are broken on purpose, or written for another version
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                module = path.relative_to(root).as_posix()
                functions.append(_read_function(node, lines, module, known))
    return functions


def _read_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], module: str, known: set[str]
) -> Function:
    docstring = ast.get_docstring(node)
    first = node.body[0]
    start = first.end_lineno if docstring is not None else first.lineno - 1
    body = tuple(line.strip() for line in lines[start : node.end_lineno] if line.strip())
    text = " ".join((docstring or "").split())
    key = text.lower()
    usable = len(text.split()) >= SHORTEST_DOCSTRING and key not in known
    known.add(key)
    given = node.args
    names = [part.arg for part in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [part.arg for part in (given.vararg, given.kwarg) if part is not None]
    return Function(
        module=module,
        name=node.name,
        signature=f"{node.name}({', '.join(name for name in names if name not in COMMON_NAMES)})",
        body=body,
        docstring=text if usable else "",
    )


def get_split(module: str) -> str:
    """The split of a module: chosen by its name, so that it is independent of other modules."""
    place = int(hashlib.sha256(module.encode()).hexdigest()[:8], 16) % 8
    return {0: "test", 1: "validation"}.get(place, "train")


def get_names(lines: Iterable[str]) -> list[str]:
    """The names and words in a piece of source code, each once, in order."""
    found = (name for line in lines for name in IDENTIFIER.findall(line))
    return list(dict.fromkeys(name for name in found if name not in COMMON_NAMES))


def show_function(function: Function, names: list[str]) -> str:
    """What the model sees of a function: its signature and some of the names used in its body.

    A name is shown only if it adds new words: the model should look for words that occur on both
    sides of the pair, and a word that occurs twice on one side is misleading.
    """
    known = set(get_words(function.signature))
    shown: list[str] = []
    for name in names:
        words = get_words(name)
        if len(shown) < MOST_NAMES and known.isdisjoint(words):
            known.update(words)
            shown.append(name)
    return f"{function.signature}: {', '.join(shown)}" if shown else function.signature


def get_words(text: str) -> list[str]:
    """get_HTTPResponse -> get, http, response: split as the tokenizer will split it."""
    return [word.lower() for word in WORD.findall(text)]


def build_docstring_pairs(functions: list[Function], rounds: int, rng: random.Random) -> list[Row]:
    """Each function with its own docstring and with another's, ``rounds`` times.

    The first round shows the beginning of the body and of the docstring; later rounds show other
    parts of both, so that a model cannot memorize the pairs.
    """
    documented = [function for function in functions if function.docstring]
    names = {id(function): get_names(function.body) for function in documented}
    rows: list[Row] = []
    for number in range(rounds):
        order = rng.sample(documented, len(documented))
        for place, function in enumerate(order):
            for owner, label in ((function, 1), (_find_other(order, place), 0)):
                shown, docstring = names[id(function)], owner.docstring.split()
                if number > 0:
                    fraction = rng.choice((0.3, 0.6, 1.0))
                    shown = [name for name in shown if rng.random() < fraction]
                    docstring = _cut_window(docstring, rng)
                text = " ".join(docstring[:LONGEST_DOCSTRING])
                rows.append(_make_row(function, owner, shown, text, label))
    return rows


def build_body_pairs(functions: list[Function], rounds: int, rng: random.Random) -> list[Row]:
    """Training only: the upper part of a body, with names from the rest of it or of another.

    The standard library has few docstrings. These pairs require the same skill (are these two
    pieces of text about the same things?) and there are many more of them.
    """
    long = [one for one in functions if len(one.body) >= LINES_TO_CUT]
    long = [one for one in long if get_names(one.body[len(one.body) * 3 // 4 :])]
    rows: list[Row] = []
    for _ in range(rounds):
        order = rng.sample(long, len(long))
        cuts = [rng.randint(len(one.body) // 4 + 1, len(one.body) * 3 // 4) for one in order]
        uppers = [get_names(one.body[:cut]) for one, cut in zip(order, cuts, strict=True)]
        lowers = {id(one): one.body[cut:] for one, cut in zip(order, cuts, strict=True)}
        for place, function in enumerate(order):
            for owner, label in ((function, 1), (_find_other(order, place), 0)):
                rest = get_names(lowers[id(owner)])[:LONGEST_DOCSTRING]
                rows.append(_make_row(function, owner, uppers[place], " ".join(rest), label))
    return rows


def _find_other(order: list[Function], place: int) -> Function:
    """The next function with a different name: one close()'s docstring fits another close()."""
    for step in range(1, len(order)):
        other = order[(place + step) % len(order)]
        if other.name != order[place].name:
            return other
    raise ValueError("all functions have the same name: there is no other docstring to pair with")


def _cut_window(words: list[str], rng: random.Random) -> list[str]:
    if len(words) <= LONGEST_DOCSTRING or rng.random() < 0.5:
        return words
    start = rng.randrange(len(words) - LONGEST_DOCSTRING + 1)
    return words[start:]


def _make_row(function: Function, owner: Function, names: list[str], text: str, label: int) -> Row:
    return {
        "sentence1": show_function(function, names),
        "sentence2": text,
        "label": label,
        "function": function.label_name,
        "belongs_to": owner.label_name,
    }


def build_splits(functions: list[Function], seed: int = SEED) -> dict[str, list[Row]]:
    """The rows of each split, shuffled."""
    parts: dict[str, list[Function]] = {split: [] for split in SPLITS}
    for function in functions:
        parts[get_split(function.module)].append(function)
    rows: dict[str, list[Row]] = {}
    for split, members in parts.items():
        rng = random.Random(f"{seed} {split}")
        rows[split] = build_docstring_pairs(members, TRAIN_ROUNDS if split == "train" else 1, rng)
        if split == "train":
            rows[split] += build_body_pairs(members, TRAIN_ROUNDS, rng)
        rng.shuffle(rows[split])
    return rows


def build_corpus(functions: list[Function]) -> Iterator[str]:
    """Text of the training modules only, so that a model pre-trained on it can still be tested."""
    for function in functions:
        if get_split(function.module) == "train":
            yield "\n".join((f"def {function.signature}:", *function.body))
            if function.docstring:
                yield function.docstring


def train_tokenizer(texts: Iterable[str], folder: Path) -> int:
    """Byte-pair encoding of lower-cased words; get_URL and getUrl are the same two words.

    The vocabulary is small on purpose: the model has to learn that *equal* tokens on both sides
    matter, and learns it sooner if it sees each token often.
    """
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


def count_parameters(model: dict[str, Any]) -> int:
    """The size of a ModernBERT classifier with two classes, without importing torch."""
    width, inner = model["hidden_size"], model["intermediate_size"]
    attention = 4 * width * width
    gated_mlp = 3 * width * inner
    # The first layer has only one norm, since its input, the embeddings, is already normalized.
    layers = model["num_hidden_layers"] * (attention + gated_mlp + 2 * width) - width
    embeddings = model["vocab_size"] * width + width
    head = width * width + width + 2 * width + 2
    return int(embeddings + layers + width + head)


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
    corpus = list(build_corpus(functions))
    write_lines(({"text": text} for text in corpus), output / "corpus.jsonl")
    model = MODEL | {"vocab_size": train_tokenizer(corpus, output / "model")}
    write_json(model, output / "model" / "config.json")
    return {
        "functions": len(functions),
        "with a docstring": sum(bool(function.docstring) for function in functions),
        **{f"{split} pairs": len(rows) for split, rows in splits.items()},
        "corpus texts": len(corpus),
        "vocabulary": model["vocab_size"],
        "model parameters": count_parameters(model),
    }


def show_summary(made: dict[str, Any], seconds: float, output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Data and model from the standard library ({seconds:.1f} s)")
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
    given = parser.parse_args()
    start = time.perf_counter()
    made = build_demo(given.output, given.limit, given.seed)
    show_summary(made, time.perf_counter() - start, given.output)


if __name__ == "__main__":
    main()
