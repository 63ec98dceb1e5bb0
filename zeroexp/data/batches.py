"""Build the batches of every step from a DataConfig."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zeroexp.config.data_kinds import DATA
from zeroexp.config.families import vocab_size_of_shape
from zeroexp.config.keys import ConfigError, DataConfig, ModelConfig
from zeroexp.data import Samples, StepBatch, ValidationTurn, packed_cache
from zeroexp.data.check_source import require_samples
from zeroexp.data.choose_tokenizer import choose_tokenizer, identity_of_tokenizer
from zeroexp.data.source_files import require_own_files, source_identity, text_files


class Data:
    """The samples of a run in the run's order, and those it validates on.

    validation: the samples of another split, of which the first data.validation_samples count. Without it the last
    data.validation_samples of `samples` are held out: no step trains on them.
    """

    def __init__(
        self, samples: Samples, config: DataConfig, seed: int, validation: Samples | None = None
    ) -> None:
        sizes = [each.vocab_size for each in (samples, validation) if each is not None]
        self.vocab_size = None if None in sizes else max(size for size in sizes if size)
        self.source = samples.source
        # Hash of all tokens, where there are any.
        self.tokens_hash: str = getattr(samples, "tokens_hash", "")
        # What the classes are called, in their order; None where samples have none.
        self.label_names: list[Any] | None = getattr(samples, "names", None)
        self._validation = validation or samples
        wanted = config.validation_samples
        if validation is None:
            num_held_out = wanted or 0
        else:
            num_held_out = len(validation) if wanted is None else min(wanted, len(validation))
        self.num_samples = len(samples) - (0 if validation else num_held_out)  # per epoch
        if self.num_samples < 1:
            raise ConfigError(
                f"data.validation_samples={wanted}: holds out all {len(samples)} samples; use fewer"
            )
        first = 0 if validation else self.num_samples
        self._validated = np.arange(first, first + num_held_out)
        self._samples, self._config, self._seed = samples, config, seed

    @property
    def identity(self) -> tuple[object, ...]:
        """What ranks that read the same have in common; numbers alone where samples have no hash."""
        validation_hash = getattr(self._validation, "tokens_hash", "")
        numbers = self.num_samples, self.num_valid_labels
        return (self.tokens_hash, validation_hash, *numbers, str(self.label_names))

    def step_batch(
        self, position: int, *, rank: int, world_size: int, replica: range | None = None
    ) -> StepBatch:
        """Return the batch of `rank` in the step that starts at global sample `position`.

        replica: the ranks over whose labels the loss is a mean, where they step by themselves; None: all ranks.
        """
        micro, whole = self._config.micro_batch_size, self._config.global_batch_size
        assert whole % (micro * world_size) == 0, (whole, micro, world_size)
        indices = sample_indices(position, whole, num_samples=self.num_samples, seed=self._seed)
        by_rank = indices.reshape(-1, world_size, micro)
        mine = by_rank[:, rank]
        num_valid, num_tokens = self._samples.count_labels_and_tokens(indices)
        if replica is not None:
            own, _ = self._samples.count_labels_and_tokens(by_rank[:, replica].reshape(-1))
            num_valid = own * (world_size // len(replica))
        return StepBatch([self._samples.read(row) for row in mine], num_valid, num_tokens)

    @property
    def num_valid_labels(self) -> int:
        """Number of labels, on all ranks, that a validation averages the loss over; 0 if nothing is validated."""
        if not len(self._validated):
            return 0
        return self._validation.count_labels_and_tokens(self._validated)[0]

    def validation_turns(self, *, rank: int, world_size: int) -> Iterator[ValidationTurn]:
        """Yield this rank's share of the validation samples, in stored order.

        Every rank gets the same number of turns, since a forward pass takes all ranks under ZeRO-3. Rank r reads the
        samples (turn * world_size + r) * micro_batch_size ...; the last turn may be short, or repeat without counting.
        """
        micro = self._config.micro_batch_size
        for start in range(0, len(self._validated), micro * world_size):
            first = start + rank * micro
            mine = self._validated[first : first + micro]
            read = mine if len(mine) else self._validated[:1]
            yield ValidationTurn(self._validation.read(read), counts=len(mine) > 0)


def sample_indices(start: int, count: int, *, num_samples: int, seed: int) -> np.ndarray:
    """Return the indices of the samples at positions start ... start + count, [count] int64; they may cross epochs."""
    positions = np.arange(start, start + count)
    epochs, places = np.divmod(positions, num_samples)
    indices = np.empty(count, dtype=np.int64)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        here = epochs == epoch
        indices[here] = _permutation(num_samples, seed, epoch)[places[here]]
    return indices


@functools.lru_cache(maxsize=2)  # a batch spans at most two epochs
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    order = np.arange(num_samples, dtype=np.int32 if num_samples <= 1 << 31 else np.int64)
    return np.random.default_rng([seed, epoch]).permutation(order)  # the same for both


def build_data(config: DataConfig, model: ModelConfig, seed: int) -> Data:
    """Open the data; tokenize and pack it first if the cache does not have it. Raises ConfigError."""
    kind = DATA[config.kind]
    samples = kind.open(config, model, seed)
    if config.kind not in DATA.own:
        require_samples(samples, config)
    if not kind.is_table or config.validation_split is None:
        return Data(samples, config, seed)
    other = replace(config, split=config.validation_split, limit=None, labels=samples.classes)
    try:
        validated = kind.open(other, model, seed)
    except ConfigError as error:
        raise ConfigError(f"data.validation_split={config.validation_split}: {error}") from error
    require_own_files(config)
    return Data(samples, config, seed, validated)


def tokenize_data(config: DataConfig, model: ModelConfig, seed: int) -> Samples:
    """Open the packed text; tokenize and pack it first if the cache does not have it."""
    words, files = choose_tokenizer(config, model), text_files(config)
    labelled = config.task == "classification"
    decisive = {
        "format": 12,
        "kind": config.kind,
        "task": config.task,
        "seq_len": config.seq_len,
        "words": identity_of_tokenizer(words),
        "files": source_identity(config, files),
        "rows": [config.subset, config.split, config.text_column],
        "labels": [model.num_labels, config.label_column, config.labels] if labelled else None,
    }

    def write(folder: Path) -> None:
        # datasets takes a second to import, and a rank that finds the folder does not need it.
        from zeroexp.data import tokenize_and_pack

        if labelled:
            assert model.num_labels is not None
            tokenize_and_pack.write_labelled(folder, config, files, words, model.num_labels)
        else:
            tokenize_and_pack.write_packed(folder, config, files, words)

    samples = packed_cache.open_packed(packed_cache.cached(decisive, write))
    most = vocab_size_of_shape(model)
    if most is not None and samples.vocab_size is not None and samples.vocab_size > most:
        # A tokenizer may have words without a row in the embedding, as Gemma 3's: what must fit are those of the text.
        samples.vocab_size = samples.num_used
    return samples
