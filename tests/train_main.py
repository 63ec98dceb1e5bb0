"""What two ranks do in test_train.py: the same training as one process, half of the samples each."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.plain_strategy import PlainStrategy
from tests.test_train import Linear, Numbers, make_config
from zeroexp.process import world as worlds
from zeroexp.training.agree_to_stop import Stop
from zeroexp.training.loop import train


def prepare(folder: Path) -> None:
    """Everything is imported above."""


def main(folder: Path, *, device: str) -> None:
    config = make_config()
    with worlds.joined_process_group(device=device) as world:
        strategy = PlainStrategy(Linear())
        records = list(train(strategy, Numbers(config), config=config, world=world))
    (folder / f"losses{world.rank}").write_text("\n".join(repr(r.loss) for r in records))


def main_until_asked(folder: Path, *, device: str) -> None:
    config, stop = make_config(), Stop()
    stop.listen(signal.SIGUSR2)
    with worlds.joined_process_group(device=device) as world:
        steps = train(
            PlainStrategy(Linear()), Numbers(config), config=config, world=world, stop=stop
        )
        taken = [next(steps).step]
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        taken += [record.step for record in steps]
    (folder / f"stopped{world.rank}").write_text(f"{taken} {'agreed' if stop.agreed else ''}")
