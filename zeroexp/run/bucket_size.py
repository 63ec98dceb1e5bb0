"""`strategy.bucket_mb=auto`: the first run on a cluster measures its links and keeps the result in outputs/links.

Later runs read that file. The bucket size that follows from it is written into the run's config.yaml, so that a rerun
or a restart uses the same size.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, replace
from pathlib import Path

from zeroexp.comm.tuning import Link, measure_link
from zeroexp.config import keys as configs
from zeroexp.config.keys import AUTO, Config
from zeroexp.process import world as worlds
from zeroexp.process.world import World
from zeroexp.tracking.json_files import read_json, write_json


def settle_bucket_size(config: Config, folder: Path, world: World) -> Config:
    """Replace `strategy.bucket_mb=auto` by a number, in the returned config and in `folder`/config.yaml.

    All ranks call it together.
    """
    if config.strategy.bucket_mb != AUTO:
        return config
    bucket_mb = _measured_or_known_link(config, folder, world).bucket_mb if world.size > 1 else None
    settled = replace(config, strategy=replace(config.strategy, bucket_mb=bucket_mb))
    if world.rank == 0:
        configs.save(settled, folder / "config.yaml")
    return settled


def _measured_or_known_link(config: Config, folder: Path, world: World) -> Link:
    """Return what reductions cost on these links.

    The answer of an earlier run counts if it had as many ranks on as many hosts of the same cluster; else the ranks
    measure now.
    """
    num_hosts = len(set(worlds.gather_objects(worlds.host_identity())))
    name = f"{config.cluster.name}-{world.backend}-{world.size}-ranks-{num_hosts}-hosts.json"
    path = folder.parent.parent / "links" / name
    link = worlds.gather_objects(_read_link(path))[0]  # every rank takes what rank 0 read
    if link is None:
        link = measure_link(world)
        gc.collect()  # frees the probe's shared memory before memory is counted
        if world.rank == 0:
            _keep_link(link, path)
    print(f"strategy.bucket_mb={link.bucket_mb:g} for {link}, kept in {path}")
    return link


def _read_link(path: Path) -> Link | None:
    """Return the link kept at `path`; None where the file is missing or unreadable, so that the ranks measure again."""
    try:
        content = read_json(path)
        return None if content is None else Link(**content)
    except (OSError, ValueError, TypeError):
        return None


def _keep_link(link: Link, path: Path) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, asdict(link))
    except OSError as error:
        print(f"the next run measures again: {error}")
