"""`strategy.bucket_mb=auto`: what a cluster's links cost is measured once and kept in outputs/links, for all its runs.

The number it comes to goes into the run's config.yaml, so that what is run again, or started again, is the same.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, replace
from pathlib import Path

from zeroexp import config as configs
from zeroexp import world as worlds
from zeroexp.comm.tuning import Link, measure
from zeroexp.config import AUTO, Config
from zeroexp.tracking.json_files import read_json, write_json
from zeroexp.world import World


def settle(config: Config, folder: Path, world: World) -> Config:
    """The config with `strategy.bucket_mb` a number, in `folder`/config.yaml too. All ranks call it together."""
    if config.strategy.bucket_mb != AUTO:
        return config
    bucket_mb = _link(config, folder, world).bucket_mb if world.size > 1 else None
    settled = replace(config, strategy=replace(config.strategy, bucket_mb=bucket_mb))
    if world.rank == 0:
        configs.save(settled, folder / "config.yaml")
    return settled


def _link(config: Config, folder: Path, world: World) -> Link:
    """As a run before found it between as many ranks on as many hosts of the same cluster, else as it is now."""
    num_hosts = len(set(worlds.gather(worlds.host_identity())))
    name = f"{config.cluster.name}-{world.backend}-{world.size}-ranks-{num_hosts}-hosts.json"
    known = folder.parent.parent / "links" / name
    link = worlds.gather(_read(known))[0]  # as rank 0 sees it
    if link is None:
        link = measure(world)
        gc.collect()  # the probe's shared memory is gone before anything is counted
        if world.rank == 0:
            _keep(link, known)
    print(f"strategy.bucket_mb={link.bucket_mb:g} for {link}, kept in {known}")
    return link


def _read(path: Path) -> Link | None:
    """None where there is nothing of use, so that it is measured again."""
    try:
        known = read_json(path)
        return None if known is None else Link(**known)
    except (OSError, ValueError, TypeError):
        return None


def _keep(link: Link, path: Path) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, asdict(link))
    except OSError as error:
        print(f"the next run measures again: {error}")
