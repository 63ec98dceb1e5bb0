"""What two ranks do in test_train.py: the same training as one process, half of the samples each."""

from __future__ import annotations

from pathlib import Path

from tests.plain_strategy import PlainStrategy
from tests.test_train import Linear, Numbers, make_config
from zeroexp import world as worlds
from zeroexp.train import train


def prepare(folder: Path) -> None:
    """Everything is imported above."""


def main(folder: Path, *, device: str) -> None:
    config = make_config()
    with worlds.joined(device=device) as world:
        strategy = PlainStrategy(Linear())
        records = list(train(strategy, Numbers(config), config=config, world=world))
    (folder / f"losses{world.rank}").write_text("\n".join(repr(r.loss) for r in records))
