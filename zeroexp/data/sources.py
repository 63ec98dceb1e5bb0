"""Choose the text and the tokenizer that a run reads, and identify them by content, which names a cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from zeroexp.config.families import shape_of
from zeroexp.config.keys import ConfigError, DataConfig, ModelConfig
from zeroexp.config.paths import cache_root, data_files, is_hub_id
from zeroexp.config.vocabulary import SHIPPED_VOCABULARY
from zeroexp.process.durable import replace_durably

DIGEST = re.compile(r"[0-9a-f]{64}")
TICK_SECONDS = 2.0  # a file may be written twice within this time and show the same timestamp
CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer's file, the id that separates documents, and the id that pads."""

    file: Path
    end_of_text: int
    padding: int

    @property
    def identity(self) -> list[str | int]:
        digest = hashlib.sha256(self.file.read_bytes()).hexdigest()
        return [digest, self.end_of_text, self.padding]

    @property
    def template(self) -> list[str]:
        """Return the hashes of the files that may hold a chat template."""
        beside = [self.file.with_name(n) for n in ("tokenizer_config.json", "chat_template.jinja")]
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in beside if file.is_file()]


def choose_tokenizer(config: DataConfig, model: ModelConfig) -> TokenizerChoice:
    """Return the tokenizer of `model.weights` if there are real weights, else the shipped one.

    `data.vocab_size=2048` selects the shipped one for any weights. Raises ConfigError.
    """
    padding = shape_of(model).get("pad_token_id") or 0
    if config.vocab_size is None and model.weights is not None:
        choice = _tokenizer_of_weights(model.weights, padding)
        if config.task == "classification" and shape_of(model).get("pad_token_id") is None:
            _refuse_a_word_as_padding(choice)
        return choice
    if config.vocab_size not in (None, SHIPPED_VOCABULARY):
        raise ConfigError(
            f"data.vocab_size={config.vocab_size}: the shipped tokenizer has {SHIPPED_VOCABULARY} words; "
            f"use {SHIPPED_VOCABULARY}, or null for the tokenizer of model.weights"
        )
    return TokenizerChoice(CORPUS / "tokenizer.json", 0, padding)


def _tokenizer_of_weights(weights: str, padding: int) -> TokenizerChoice:
    # The hub's client takes half a second to import, and random weights do not need it.
    from zeroexp.models import find_weights

    folder = find_weights.model_folder(weights)
    for name in ("tokenizer.json", "config.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"model.weights={weights}: no {name} in it, so its tokenizer is unknown; "
                f"set data.vocab_size={SHIPPED_VOCABULARY} for the shipped tokenizer"
            )
    end_of_text = (
        json.loads((folder / "config.json").read_text(encoding="utf-8")).get("eos_token_id") or 0
    )
    first = end_of_text[0] if isinstance(end_of_text, list) else end_of_text
    return TokenizerChoice(folder / "tokenizer.json", first, padding)


def _refuse_a_word_as_padding(choice: TokenizerChoice) -> None:
    """A head takes the last tokens of a text for padding if they have its id, and reads the one before them."""
    special = [
        row["id"] for row in json.loads(choice.file.read_text(encoding="utf-8"))["added_tokens"]
    ]
    if choice.padding not in special:
        problem = f"token {choice.padding}, which would pad, is a word of the tokenizer"
        remedy = "set it to a token that texts do not have, with a + before it"
        raise ConfigError(f"model.hf_config.pad_token_id=null: {problem}; {remedy}")


def text_files(config: DataConfig) -> list[Path]:
    """Return the local files to read, sorted; the list is empty if the source is the hub. Raises ConfigError."""
    if config.kind == "text" and config.path is None:
        return [CORPUS / "python_reference.txt"]
    return [] if is_hub_id(config) else data_files(config)


def source_identity(config: DataConfig, files: list[Path]) -> list[list[str | int]]:
    """Return what identifies the text: the hub id, or the name and content hash of each file."""
    if not files:
        return [[str(config.path), config.limit or 0]]
    return [[str(file.resolve()), _digest(file), config.limit or 0] for file in files]


def _digest(file: Path) -> str:
    """Return the hash of the file's content; the cache keeps it by the file's metadata, so that ranks need not read."""
    stat = file.stat()
    seen = [str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    kept = cache_root() / "digests" / hashlib.sha256(json.dumps(seen).encode()).hexdigest()
    with contextlib.suppress(OSError, UnicodeError):
        if DIGEST.fullmatch(stored := kept.read_text(encoding="utf-8")):
            return stored
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if time.time() - stat.st_ctime > TICK_SECONDS:
        # If the cache cannot be written, the file is read each time.
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            replace_durably(kept, digest.encode())
    return digest
