"""Size of the data's vocabulary, as far as a config tells: a model that names none takes the data's."""

from __future__ import annotations

from zeroexp.config.data_sources import DATA
from zeroexp.config.families import vocabulary
from zeroexp.config.keys import Config

SHIPPED_VOCABULARY = 2048  # vocabulary size of the tokenizer in data/corpus


def vocabulary_of_data(config: Config) -> int | None:
    """Return the size for which a run builds the model; None where the model or its weights decide."""
    data, model = config.data, config.model
    takes_shipped = DATA[data.kind].tokenizes and model.weights is None
    if data.vocab_size is None and takes_shipped and vocabulary(model) is None:
        return SHIPPED_VOCABULARY
    return data.vocab_size
