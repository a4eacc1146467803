"""EasyNLP's ``--user-defined-parameters "key=value key=value"``, and its ``--app-name``.

A key that is a setting of ours, in any dialect, sets it; a flag on the command line wins. Any other
key is the script's: ``get_args().key`` gives its text.
"""

from __future__ import annotations

from rapidformer.config.reading import split_words
from rapidformer.config.schema import get_settings
from rapidformer.foreign_names import ForeignName, get_foreign_flags, honoured, ignored

_FLAG = "--user-defined-parameters"
# The spelling of EasyNLP's scripts.
_NAMES = {"pretrain_model_name_or_path": "pretrained_model_name_or_path"}
EASYNLP: dict[str, ForeignName] = {
    "user_defined_parameters": honoured("key=value pairs: settings, and names of the script's own"),
    "app_name": ignored("--task overrides it; without --task, it chooses the task"),
}
APPLICATIONS = {
    "text_classify": "sequence_classification",
    "text_match": "sequence_classification",
    "sequence_labeling": "token_classification",
    "machine_reading_comprehension": "question_answering",
    "sequence_generation": "seq2seq_lm",
    "text_generation": "causal_lm",
    "language_modeling": "pretraining",
}
"""EasyNLP's applications, as tasks."""


def take_user_defined(words: list[str], problems: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words with the settings among the parameters in front, and the script's own ones."""
    kept, text = _split(words)
    if text is None:
        return kept, {}
    settings, aliases, flags = get_settings(), get_foreign_flags().aliases, []
    extras = {"user_defined_parameters": text}
    for part in split_words(text, problems, _FLAG):
        key, equals, value = part.partition("=")
        if not equals or not key:
            problems.append(f"{_FLAG}: {part!r} must be key=value.")
            continue
        key = key.replace("-", "_")
        name = _NAMES.get(key, aliases.get(key, key))
        if name in settings:
            flags += [settings[name].flag, value]
        else:
            extras[key] = value
    return [*flags, *kept], extras


def _split(words: list[str]) -> tuple[list[str], str | None]:
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != _FLAG:
            continue
        if equals:
            return words[:place] + words[place + 1 :], value
        value = words[place + 1] if place + 1 < len(words) else ""
        return words[:place] + words[place + 2 :], value
    return words, None
