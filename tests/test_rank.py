"""Whole runs through the local cluster: what a rank leaves in its folder when all goes well, and when it does not."""

from __future__ import annotations

import ctypes
import io
import itertools
import json
import os
import re
import resource
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests import rank_code
from tests.run_folders import record
from zeroexp.checkpoint.folders import newest_checkpoint
from zeroexp.checkpoint.manifest import read_manifest
from zeroexp.cluster.follow import ShownRun
from zeroexp.cluster.job import Job, JobOutcome
from zeroexp.cluster.local import LocalCluster
from zeroexp.config import keys as configs
from zeroexp.config.keys import Config, ConfigError, DataConfig
from zeroexp.data.batches import Data
from zeroexp.process.world import World
from zeroexp.report.sweep_progress import SweepProgress
from zeroexp.run import rank
from zeroexp.run.rank import keep_freed_memory, prepare  # noqa: F401
from zeroexp.tracking.files import RecordWriter, read_records, read_summary
from zeroexp.tracking.run import read_run
from zeroexp.training.agree_to_stop import Stop

WIDTH, DEPTH = 32, 2
PR_SET_THP_DISABLE = 41  # <linux/prctl.h>


def make_job(folder: Path, world_size: int = 2, **changes: Any) -> Job:
    """A change is given as section__key=value."""
    config = make_config(world_size)
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    folder.mkdir()
    configs.save(config, folder / "config.yaml")
    return Job(folder)


def make_config(world_size: int) -> Config:
    """A small MLP on synthetic numbers under our ddp."""
    config = Config(world_size=world_size)
    config.model.family, config.model.task = "mlp", "regression"
    config.model.mlp = {"width": WIDTH, "depth": DEPTH}
    config.data.kind, config.data.task, config.data.seq_len = "synthetic", "regression", 8
    config.data.global_batch_size, config.data.micro_batch_size = 4, 1
    config.strategy.name = "ddp"
    config.strategy.parameters.placement = "replicate"
    config.strategy.gradients.placement = "replicate"
    config.strategy.optimizer.placement = "replicate"
    config.train.warmup_steps, config.train.steps = 1, 3
    return config


def log_of(job: Job, rank: int) -> str:
    return (job.folder / "logs" / f"rank{rank}.log").read_text()


def process_of(job: Job, rank: int) -> int:
    found = re.search(r"process (\d+)", log_of(job, rank))
    return int(found[1])


def test_what_a_run_leaves_in_its_folder(local, tmp_path):
    job = make_job(tmp_path / "run")
    with RecordWriter(job.folder) as writer:
        writer.write(record(7))  # of an earlier attempt, which is shown no more
    told, stepped = io.StringIO(), list[Path]()
    shown = ShownRun(1, job, SweepProgress(1, told), stepped.append, skip=True)
    shown.start()
    outcome = local.run(job, shown.show_steps)
    assert outcome == JobOutcome("done"), outcome.cause
    assert stepped == [job.folder] * 4 and "[1/1] run | step 4/4 | loss " in told.getvalue()
    records, summary = read_records(job.folder), read_summary(job.folder)
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert (summary.world_size, summary.num_warmup_steps, summary.num_steps) == (2, 1, 3)
    assert (summary.initial_loss, summary.final_loss) == (records[0].loss, records[-1].loss)
    assert all(len(spread.per_rank) == 2 for spread in summary.memory.by_kind.values())
    assert summary.peak_flops_source == "calibrated" and summary.mfu is not None
    # Two matrices of WIDTH x 4 WIDTH in each block; four samples of eight vectors; 6 operations a weight.
    assert summary.model_flops_per_step == 4 * 8 * 6 * DEPTH * 2 * WIDTH * 4 * WIDTH
    assert summary.mfu * summary.step_seconds_median * 2 * summary.peak_flops_per_second == (
        pytest.approx(summary.model_flops_per_step)
    )
    assert "rank 1 of 2" in log_of(job, 1)
    assert f"it may run on CPUs {sorted(os.sched_getaffinity(0))}\n" in log_of(job, 1)
    assert summary.data_source.startswith("synthetic: vectors of ")
    assert f"data from {summary.data_source}\n" in log_of(job, 1)
    dtypes = ("weights", "products", "gradients", "moments", "reduced", "master", "norm")
    # What the config leaves open, as two ranks of one host settle it, and dtypes as found.
    assert read_run(job.folder).engine == {
        "dtypes": ", ".join(f"{role} float32" for role in dtypes),
        "transport": "direct",
        "bucket_mb": "4.0",
        "prefetch": "null",
        "reduce_each": "step",
        "reductions_in_flight": "1",
    }


@pytest.fixture(scope="module")
def replicated(local, tmp_path_factory) -> Job:
    job = make_job(
        tmp_path_factory.mktemp("replicated") / "run",
        strategy__implementation="torch",
        checkpoint__every=100,  # behind the last step alone
        optimizer__kinds={"vectors": {"weight_decay": 0.0}},
    )
    assert local.run(job).status == "done"
    return job


def test_what_each_row_of_optimizers_steps_and_the_dtypes_found_stand_side_by_side(replicated):
    engine = read_run(replicated.folder).engine
    assert "vectors" in engine["optimizers"] and "master float32" in engine["dtypes"]


def test_peaks_and_wire_are_known_on_the_cpu(replicated):
    job = replicated
    *_, last = read_records(job.folder)
    (memory,) = [r.memory_bytes for r in read_records(job.folder) if r.memory_bytes is not None]
    held = max(sum(kinds.values()) for kinds in memory.values())
    assert last.peak_bytes is not None and last.allocated_bytes is not None
    assert held <= last.peak_bytes < 3 * held
    summary = read_summary(job.folder)
    assert summary is not None and summary.memory.build_peak is not None
    parameters = memory["at_rest"]["parameters"]
    # The parameters and the buckets of DDP. A few small tensors are freed late, and so may be the copy in which a rank
    # is sent the first weights, by a thread of gloo's.
    assert 0 <= summary.memory.build_peak.fullest - 2 * parameters < parameters + 4096
    gradients = memory["after_backward"]["gradients"]
    # An all-reduce among two ranks sends the gradients once; gloo's headers, the loss and the barrier are small.
    assert last.wire_bytes is not None
    assert gradients <= last.wire_bytes < gradients + 4096


def test_ranks_draw_by_themselves(replicated):
    newest = newest_checkpoint(replicated.folder)
    assert newest is not None
    states = read_manifest(newest).rng.values()
    assert len({kinds["torch"].pieces[0].hash for kinds in states}) == 2


def test_ranks_of_another_seed_draw_otherwise(monkeypatch, tmp_path):
    monkeypatch.setattr(rank, "load_newest", lambda *_, **__: None)
    seeds: set[int] = set()
    for seed, number in itertools.product(range(2), range(2)):
        config, world = make_config(2), World(number, 2, torch.device("cpu"), "gloo")
        config.train.seed = seed
        with torch.random.fork_rng():
            rank._resume(config, tmp_path, Mock(), world, "")
            seeds.add(torch.initial_seed())
    assert len(seeds) == 4


class Zeros:
    """Samples of one token, of which there are `number`."""

    vocab_size, source = None, "zeros"

    def __init__(self, tokens_hash: str, number: int) -> None:
        self.tokens_hash, self.number = tokens_hash, number

    def __len__(self) -> int:
        return self.number

    def count_labels_and_tokens(self, indices: Any) -> tuple[int, int]:
        return len(indices), len(indices)

    def read(self, indices: Any) -> Any:
        raise AssertionError("nobody reads what is not the same")


def refuse_other(world: World, folder: Path) -> None:
    """Samples whose hash or number another rank has otherwise, of training and of validation."""
    same = Zeros("a", 8)
    for other in (Zeros("ab"[world.rank], 8), Zeros("a", 8 + world.rank)):
        for samples, validation in ((other, None), (other, same), (same, other)):
            data = Data(samples, DataConfig(), 0, validation)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(rank, "build_data", lambda *_: data)  # noqa: B023
                with pytest.raises(ConfigError, match="ranks read different data"):
                    rank._train(Config(), world, folder, Stop())


def test_ranks_that_read_other_data_than_the_first_are_refused(ranks, tmp_path):
    ranks(refuse_other, tmp_path)


def test_what_a_rank_raises_is_in_failure_and_log(local, tmp_path):
    job = make_job(tmp_path / "run", optimizer__name="adagrad")
    outcome = local.run(job)
    assert outcome.status == "failed" and outcome.cause is not None
    assert outcome.cause["exception"] == "UnknownWord"
    assert "optimizer.name=adagrad" in outcome.cause["message"]
    assert "Traceback" in outcome.cause["traceback"]
    log = Path(outcome.cause["log"]).read_text(encoding="utf-8")
    assert "optimizer.name=adagrad" in log and "Traceback" in log
    assert json.loads((job.folder / "failure.json").read_text()) == outcome.cause
    assert read_summary(job.folder) is None


@pytest.mark.slow
def test_the_server_has_imported_what_a_rank_needs(tmp_path):
    """Else every rank of every point would pay for it: seconds for transformers and torch's compiler."""
    job = make_job(
        tmp_path / "run",
        model__family="llama",
        model__task="causal",
        model__hf_config={
            **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        },
        data__task="causal",
    )
    with LocalCluster(Config().cluster, rank_main="tests.imports_main:main") as local:
        assert local.run(job).status == "done"
        # Forking would lose a thread. The kernel's list of them also shows those of C++.
        assert len(os.listdir(f"/proc/{local.server}/task")) == 1
    imported = json.loads((job.folder / "imported.json").read_text())
    assert len(imported) < 5, imported


def count_faults(folder: Path, *, device: str) -> None:
    """In a rank's process: the page faults of each of some large tensors, one after the other."""
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # with huge pages there are few to save
    keep_freed_memory()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(25_000_000)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    (folder / "faults").write_text(" ".join(str(faults()) for _ in range(12)))


def test_freed_memory_is_handed_out_again_without_a_page_fault(local, tmp_path):
    job = make_job(tmp_path / "run", world_size=1)
    rank_code.choose(job.folder, f"{__name__}:{count_faults.__name__}")
    assert local.run(job).status == "done"
    first, *_, last = map(int, (job.folder / "faults").read_text().split())
    assert first > 10_000  # 100 MB in pages of 4 KiB
    assert last < 100  # not at once: up to seven fragments wait before they join their neighbours


def train_until_the_model_exits(folder: Path, *, device: str) -> None:
    """In a rank's process."""

    def leave(self: torch.nn.Module, *inputs: Any) -> torch.Tensor:
        raise SystemExit(0)

    torch.nn.Linear.forward = leave
    rank.main(folder, device=device)


def test_a_model_that_exits_has_not_ended_its_run(local, tmp_path):
    job = make_job(tmp_path / "run", world_size=1)
    rank_code.choose(job.folder, f"{__name__}:{train_until_the_model_exits.__name__}")
    outcome = local.run(job)
    assert outcome.status == "failed"
    assert outcome.cause is not None and outcome.cause["exception"] == "SystemExit"
    assert "in leave" in outcome.cause["traceback"]
