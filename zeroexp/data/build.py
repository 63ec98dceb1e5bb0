"""Build the batches of every step from a DataConfig."""

from __future__ import annotations

from pathlib import Path

from zeroexp.config import ConfigError, DataConfig, ModelConfig, vocabulary
from zeroexp.data import Samples, StepBatch, packed, sources
from zeroexp.data.order import sample_indices
from zeroexp.data.synthetic import SyntheticTokens, SyntheticVectors


class Data:
    """The samples of a run in the run's order."""

    def __init__(self, samples: Samples, config: DataConfig, seed: int) -> None:
        self.vocab_size = samples.vocab_size
        self.source = samples.source
        self.num_samples = len(samples)  # per epoch
        self._samples, self._config, self._seed = samples, config, seed

    def step_batch(self, position: int, *, rank: int, world_size: int) -> StepBatch:
        """Return the batch of `rank` in the step that starts at global sample `position`."""
        micro, whole = self._config.micro_batch_size, self._config.global_batch_size
        assert whole % (micro * world_size) == 0, (whole, micro, world_size)
        indices = sample_indices(position, whole, num_samples=len(self._samples), seed=self._seed)
        mine = indices.reshape(-1, world_size, micro)[:, rank]
        num_valid, num_tokens = self._samples.count(indices)
        return StepBatch([self._samples.read(row) for row in mine], num_valid, num_tokens)


def build_data(config: DataConfig, model: ModelConfig, seed: int) -> Data:
    """Open the data; tokenize and pack it first if the cache does not have it. Raises ConfigError."""
    if config.kind == "synthetic":
        return Data(_synthetic(config, model, seed), config, seed)
    if config.kind not in ("text", "reviews"):
        raise ConfigError(f"data.kind={config.kind}: use text, reviews or synthetic")
    return Data(packed.open_packed(_packed_folder(config, model)), config, seed)


def _synthetic(config: DataConfig, model: ModelConfig, seed: int) -> Samples:
    if config.task == "regression":
        return SyntheticVectors(model.mlp["width"], config.seq_len, seed)
    words = config.vocab_size or vocabulary(model)
    if words is None:
        raise ConfigError(
            "data.vocab_size=null: the model names no vocabulary; set data.vocab_size=2048"
        )
    return SyntheticTokens(words, config.seq_len, seed)


def _packed_folder(config: DataConfig, model: ModelConfig) -> Path:
    words, files = sources.choose_words(config, model), sources.text_files(config)
    decisive = {
        "format": 2,
        "task": config.task,
        "seq_len": config.seq_len,
        "words": words.identity,
        "files": sources.identity(config, files),
        "num_labels": model.num_labels if config.task == "classification" else None,
    }

    def write(folder: Path) -> None:
        # datasets takes a second to import, and a rank that finds the folder does not need it.
        from zeroexp.data import text

        if config.task == "classification":
            assert model.num_labels is not None
            text.write_reviews(folder, config, files, words, model.num_labels)
        else:
            text.write_packed(folder, config, files, words)

    return packed.cached(decisive, write, is_whole=packed.can_be_read)
