"""Choose the tokenizer of a run: the shipped one or that of its weights; its content is part of the cache's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zeroexp.config.families import shape_of
from zeroexp.config.keys import ConfigError, DataConfig, ModelConfig
from zeroexp.config.vocabulary import SHIPPED_VOCABULARY, TokenizerChoice
from zeroexp.data.source_files import CORPUS
from zeroexp.process.content_hash import hash_of_file

TOKENIZER_CONFIG = "tokenizer_config.json"


def identity_of_tokenizer(words: TokenizerChoice) -> list[str | int]:
    """Return what decides the tokens: ids, and hashes of the file and of those that may hold a chat template."""
    beside = [words.file.with_name(n) for n in (TOKENIZER_CONFIG, "chat_template.jinja")]
    hashes = [hash_of_file(file) for file in (words.file, *beside) if file.is_file()]
    return [*hashes, words.end_of_text, words.padding]


def choose_tokenizer(config: DataConfig, model: ModelConfig) -> TokenizerChoice:
    """Return the tokenizer of `model.weights` if there are real weights, else the shipped one.

    `data.vocab_size=2048` selects the shipped one for any weights. Raises ConfigError.
    """
    padding = shape_of(model).get("pad_token_id") or 0
    if config.vocab_size is None and model.weights is not None:
        choice = _tokenizer_of_weights(model.weights, padding, config.task)
        if config.task == "classification" and shape_of(model).get("pad_token_id") is None:
            _refuse_a_word_as_padding(choice)
        return choice
    return TokenizerChoice(CORPUS / "tokenizer.json", 0, padding)


def _tokenizer_of_weights(weights: str, padding: int, task: str) -> TokenizerChoice:
    # The hub's client takes half a second to import, and random weights do not need it.
    from zeroexp.models import find_weights

    folder = find_weights.model_folder(weights)
    for name in ("tokenizer.json", "config.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"model.weights={weights}: no {name} in it, so its tokenizer is unknown; "
                f"set data.vocab_size={SHIPPED_VOCABULARY} for the shipped tokenizer"
            )
    _refuse_missing_tokens(weights, folder)
    end_of_text = _end_of_text(folder)
    if end_of_text is None and task == "causal":
        raise ConfigError(
            f"model.weights={weights}: neither its config.json nor its tokenizer_config.json names the token that "
            "ends a text; set eos_token_id in config.json"
        )
    return TokenizerChoice(folder / "tokenizer.json", end_of_text or 0, padding)


def _refuse_missing_tokens(weights: str, folder: Path) -> None:
    """A text is cut into the letters of a token that stands in another file alone, which transformers reads too."""
    config = _json_of(folder / TOKENIZER_CONFIG)
    named = [value for key, value in config.items() if key.endswith(("_token", "_special_tokens"))]
    decoder = config.get("added_tokens_decoder")
    if decoder is not None:
        named.append([*decoder.values()])
    else:  # transformers wrote these once
        named += _json_of(folder / "special_tokens_map.json").values()
        named.append([*_json_of(folder / "added_tokens.json")])
    words = _json_of(folder / "tokenizer.json").get("added_tokens", ())
    missing = [word for each in named for word in _tokens_in(each)]
    missing = sorted({*missing} - {word["content"] for word in words})
    if missing:
        problem = (
            f"other files of its tokenizer name {', '.join(missing[:5])}, tokenizer.json does not"
        )
        remedy = "save it anew with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        raise ConfigError(f"model.weights={weights}: {problem}; {remedy}")


def _tokens_in(named: Any) -> list[str]:
    """Return the tokens in a value of a tokenizer's files: a text, an object with its content, or several."""
    if isinstance(named, dict):
        named = named["content"] if "content" in named else [*named.values()]
    if isinstance(named, list):
        return [token for each in named for token in _tokens_in(each)]
    return [named] if isinstance(named, str) else []


def _json_of(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _end_of_text(folder: Path) -> int | None:
    """Return the id that ends a text: the config's, or the tokenizer's where the config has none or a mere word."""
    named = _json_of(folder / "config.json").get("eos_token_id")
    first = named[0] if isinstance(named, list) else named
    tokenizer = _json_of(folder / "tokenizer.json")
    added = {row["content"]: row["id"] for row in tokenizer.get("added_tokens", ())}
    if first in added.values():
        return first
    text = _json_of(folder / TOKENIZER_CONFIG).get("eos_token")
    own = added.get(text["content"] if isinstance(text, dict) else text)
    return first if own is None else own


def _refuse_a_word_as_padding(choice: TokenizerChoice) -> None:
    """A head takes the last tokens of a text for padding if they have its id, and reads the one before them."""
    special = [
        row["id"] for row in json.loads(choice.file.read_text(encoding="utf-8"))["added_tokens"]
    ]
    if choice.padding not in special:
        problem = f"token {choice.padding}, which would pad, is a word of the tokenizer"
        remedy = "set it to a token that texts do not have, with a + before it"
        raise ConfigError(f"model.hf_config.pad_token_id=null: {problem}; {remedy}")
