"""The tokenizer of a run's data, and the size of its vocabulary, as far as a config tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zeroexp.config.data_kinds import DATA
from zeroexp.config.families import vocab_size_of_shape
from zeroexp.config.keys import Config

SHIPPED_VOCABULARY = 2048  # vocabulary size of the tokenizer in data/corpus


@dataclass(frozen=True)
class TokenizerChoice:
    file: Path  # tokenizer.json; the tokenizer files beside it belong to it
    end_of_text: int  # the id that separates documents
    padding: int


def vocab_size_of_data(config: Config) -> int | None:
    """Return the size for which a run builds the model, as one that names none takes the data's.

    It is None where the model or its weights decide.
    """
    data, model = config.data, config.model
    takes_shipped = DATA[data.kind].tokenizes and model.weights is None
    if data.vocab_size is None and takes_shipped and vocab_size_of_shape(model) is None:
        return SHIPPED_VOCABULARY
    return data.vocab_size
