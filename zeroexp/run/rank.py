"""One process of a run from start to end: it joins data, model, engine, loop and checkpoints.

It reads config.yaml in the run's folder. Rank 0 writes records.jsonl and summary.json there, every rank writes
logs/rank<r>.log, and the first rank that fails writes failure.json.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zeroexp.checkpoint.load import load_newest
from zeroexp.checkpoint.save import Saver
from zeroexp.comm.collectives import held_shared_bytes
from zeroexp.config import keys as configs
from zeroexp.config import plugins
from zeroexp.config.keys import Config, ConfigError
from zeroexp.config.optimizer import optimizer_factory, rows_of
from zeroexp.config.parameter_groups import describe_groups, parameter_groups
from zeroexp.data.batches import Data, build_data
from zeroexp.engines.build import build_strategy, row_dtypes
from zeroexp.interface.strategy import Strategy
from zeroexp.measure.dtypes_found import dtypes_asked
from zeroexp.measure.instruments import Instruments
from zeroexp.measure.memory import (
    AllocationMeter,
    compile_allocator,
    count_cpu_allocations,
    most_held_bytes,
)
from zeroexp.measure.peak_flops import peak_flops
from zeroexp.measure.record import StepRecord
from zeroexp.measure.summary import diverged_at, summarise, summarise_rank
from zeroexp.measure.system_samples import sampling_system
from zeroexp.models.checkpointing import checkpoint_as_configured
from zeroexp.models.compiled_blocks import compile_as_configured, graphs_compiled
from zeroexp.models.flops import flops_per_sample
from zeroexp.models.module import BuiltModel, build_deferred, build_model
from zeroexp.plan.outcome import plan_beside
from zeroexp.plan.peak import rehearsed_beside
from zeroexp.process import progress
from zeroexp.process import world as worlds
from zeroexp.process.cheap_imports import importing_cheaply
from zeroexp.process.world import World
from zeroexp.tracking import attempt, failure
from zeroexp.tracking.files import (
    RecordWriter,
    read_records,
    read_summary,
    working_folder_of,
    write_engine,
    write_summary,
)
from zeroexp.training.agree_to_stop import ASKS_TO_STOP, SAVED, Stop
from zeroexp.training.loop import first_measured_step, train
from zeroexp.zero.options import DTYPES

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # <malloc.h>
PEER_SECONDS = 600.0  # for which a rank waits for a peer
WATCHED_SECONDS = 20 * 86400.0  # in milliseconds less than 2^31
TEXT: Any = {"encoding": "utf-8", "errors": "backslashreplace"}


def prepare(folder: Path) -> None:
    """Import and compile what `main` needs, in a process that forks ranks later.

    It starts no thread and leaves no model in memory.
    """
    compile_allocator()
    with contextlib.suppress(Exception, SystemExit):  # the ranks meet the same error and report it
        import_for(_config(folder))


def import_for(config: Config) -> None:
    """Import what ranks with this config need. Raises whatever the config's model or optimizer does."""
    with importing_cheaply("scipy"):  # a third of a second for what transformers' detectors need
        model = build_model(config.model, seed=0, device="meta", vocab_size=config.data.vocab_size)
        groups = parameter_groups(model.module, config.optimizer, model.blocks)
        optimizer_factory(config.optimizer)(groups)  # has torch import its compiler already here


def main(folder: Path, *, device: str) -> None:
    """Run as the rank that the environment names, on `device` (cpu | cuda).

    Raises SystemExit(1) after it has written down an error, and SystemExit(SAVED) when the run was asked to stop.
    """
    place = worlds.rank_info_from_environment(os.environ)
    _send_output_to(failure.log_path(folder, place.rank))
    progress.share()
    spare = os.open(os.devnull, os.O_RDONLY)
    try:
        code = _run(folder, device)
    except (Exception, SystemExit) as error:  # what a model or plugin exits with is no end of a run
        os.close(spare)  # else a rank that ran out of files could not write down that it did
        failure.write_raised(folder, place.rank, error, peak_bytes=most_held_bytes())
        traceback.print_exc()
        raise SystemExit(1) from error
    if code:
        raise SystemExit(code)


def _run(folder: Path, device: str) -> int:
    """Train and return the exit code."""
    config, stop = _config(folder), Stop()
    if config.cluster.requeue:
        stop.listen(*ASKS_TO_STOP)
    torch.set_num_threads(config.cluster.threads_per_rank)
    if device == "cpu":
        keep_freed_memory()
        if uncounted := count_cpu_allocations():
            print(uncounted)
    progress.note_phase(0, progress.MEETING)
    first_of_node = worlds.rank_info_from_environment(os.environ).local_rank == 0
    samples = sampling_system(folder, config.tracking.system_s if first_of_node else None)
    # Who watches the ranks ends waits that are in vain, and knows saves, debuggers and suspended jobs.
    patience = WATCHED_SECONDS if progress.is_watched() else PEER_SECONDS
    joined = worlds.joined_process_group(device=device, timeout_seconds=patience)
    with samples, joined as world:
        over = _train(config, world, folder, stop)
    # Runs of this machine are rehearsed when their ranks have ended (cluster/sweep.py).
    if over and config.study.plan_must_hold and config.cluster.kind == "slurm" and world.rank == 0:
        add_rehearsal(folder, device=device)
    return 0 if over else SAVED


def add_rehearsal(folder: Path, *, device: str) -> None:
    """Put what a rehearsal says beside what the run in `folder` has measured, or why there is none.

    It is called in a process without a process group.
    """
    _send_output_to(failure.log_path(folder, 0))
    torch.set_num_threads(1)
    if summary := read_summary(folder):
        config = _with_measured_steps(_config(folder), summary.num_steps)
        rehearsed, reason = _beside("rehearsal", lambda: rehearsed_beside(config, device))
        write_summary(folder, replace(summary, rehearsed=rehearsed, not_rehearsed=reason))


def _config(folder: Path) -> Config:
    """Return the run's config, with its plugins imported. Raises ConfigError.

    From here on this process stands where the command was given, and not where a rerun is: paths may be relative.
    """
    config, given_in = configs.load(folder / "config.yaml"), working_folder_of(folder)
    with contextlib.suppress(OSError):  # it may be gone, with the sweep moved
        os.chdir(given_in or ".")
    plugins.load(config.plugins, given_in)
    return config


def keep_freed_memory() -> None:
    """Have the C library reuse freed memory instead of returning it to the system, whatever the engine.

    By default it maps large tensors one by one, and every step pays for clearing thousands of fresh pages. With reuse a
    step of 20M parameters takes 4 % less CPU time under DDP, 8 % less under our ZeRO-3 and the same under FSDP2, at
    the same resident size.
    """
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, -1)


def _train(config: Config, world: World, folder: Path, stop: Stop) -> bool:
    """Build everything and train; return False if the run was stopped before its last step and saved a checkpoint."""
    began = time.perf_counter()
    progress.note_phase(0, progress.BUILDING)
    data = build_data(config.data, config.model, config.train.seed)
    _refuse_other_data(config, data)
    memory = AllocationMeter(world.device)
    model = build_deferred(config.model, seed=config.train.seed, vocab_size=data.vocab_size)
    needed = flops_per_sample(model.module, config.model, config.data.seq_len)
    blocks = {name: model.module.get_submodule(name) for name in model.blocks}
    num_parameters = sum(p.numel() for p in model.module.parameters())
    asked, optimizers = _asked_by_kind(config, model)
    checkpoint_as_configured(model.module, model.blocks, config.train)
    compile_as_configured(model.module, model.blocks, config.train)
    strategy = build_strategy(config, model, world)
    if (build_peak_bytes := memory.peak_bytes()) is not None:
        build_peak_bytes += held_shared_bytes()
    if world.rank == 0:
        write_engine(folder, {**_settings_of(strategy), **optimizers})
    _log_build(world, time.perf_counter() - began, data)
    facts, number = _environment_facts(config, data), attempt.own_number() or 0
    saver = Saver(folder, strategy, facts, world, attempt=number, tokens_hash=data.tokens_hash)
    num_steps = config.train.warmup_steps + config.train.steps
    start_step, is_own = _resume(config, folder, strategy, world, data.tokens_hash)
    gc.collect()
    gc.freeze()  # what is built lives to the end, and no collection (measure/drift.py) has to visit it
    instruments = Instruments(config.train, world, folder, model.module, blocks, _labels(config))
    steps = train(
        strategy,
        data,
        config=config,
        world=world,
        start_step=start_step,
        pause=saver.is_due,
        stop=stop,
        instruments=instruments,
    )
    steps = _while_finite(steps) if config.events.nan == "end" else steps
    records = _run_steps(steps, saver, world, folder, start_step, is_own)
    found = _found_in_steps(config, instruments, asked)
    if world.rank == 0:
        write_engine(folder, {**_settings_of(strategy), **optimizers, **found})
    progress.note_phase(num_steps, progress.AFTER)
    over = not records or records[-1].step + 1 == num_steps
    if not over:
        saver.save_now(records[-1].step + 1)
    elif records:  # without records the resumed run had no step left to do
        measured = _with_measured_steps(config, num_steps - first_measured_step(config, start_step))
        facts = {
            "data_source": data.source,
            "num_parameters": num_parameters,
            "plan": {} if world.rank else _plan(measured, strategy, data.vocab_size),
            **_speed(config, world, needed * config.data.global_batch_size),
        }
        _summarise(folder, world, records, facts, build_peak_bytes)
        if config.checkpoint.every is not None:  # after the summary: a finished run needs that more
            saver.save_now(num_steps)
    saver.close()
    return over


def _refuse_other_data(config: Config, data: Data) -> None:
    """Raise ConfigError unless all ranks read the same: nodes pack what each of them sees."""
    if len({*worlds.gather_objects(data.identity)}) > 1:
        problem = f"data.path={config.data.path}: ranks read different data"
        raise ConfigError(f"{problem}; give all nodes the same files")


def _log_build(world: World, seconds: float, data: Data) -> None:
    print(f"rank {world.rank} of {world.size}, process {os.getpid()}: built in {seconds:.2f} s")
    print(f"it may run on CPUs {sorted(os.sched_getaffinity(0))}")
    print(f"data from {data.source}")


def _environment_facts(config: Config, data: Data) -> Config:
    """Return the config that a checkpoint holds: the classes are named, for who exports it without the data."""
    if data.label_names is None:
        return config
    return replace(config, data=replace(config.data, labels=data.label_names))


def _labels(config: Config) -> dict[str, str]:
    return {
        "strategy": config.strategy.name,
        "implementation": config.strategy.implementation,
        "model": config.model.name,
    }


def _settings_of(strategy: Strategy) -> dict[str, Any]:
    return getattr(strategy, "settings", {})


def _asked_by_kind(config: Config, model: BuiltModel) -> tuple[dict[str, str], dict[str, str]]:
    """Return dtypes by role, and what each row of `optimizer.kinds` steps, before an engine changes the parameters."""
    groups = parameter_groups(model.module, config.optimizer, model.blocks)
    has_rows = len(rows_of(config.optimizer)) > 1
    optimizers = {"optimizers": describe_groups(groups, config.optimizer)} if has_rows else {}
    return dtypes_asked(config, groups), optimizers


def _found_in_steps(
    config: Config, instruments: Instruments, asked: dict[str, str]
) -> dict[str, Any]:
    """Return what engine.json keeps of all ranks, which call this together."""
    instruments.dtypes.gather()
    graphs = graphs_compiled() if config.train.compile else {}
    return {**graphs, **instruments.dtypes.as_record(asked)}


def _with_measured_steps(config: Config, number: int) -> Config:
    """Return the config of a resumed run that has measured so many, among which outer steps are or not."""
    num_steps = config.train.warmup_steps + config.train.steps
    train = replace(config.train, warmup_steps=num_steps - number, steps=number)
    return replace(config, train=train)


def _plan(config: Config, strategy: Strategy, vocab_size: int | None) -> dict[str, float]:
    """Return the plan of this run, to stand beside what was measured."""
    return _beside("plan", lambda: plan_beside(config, _settings_of(strategy), vocab_size))[0]


def _beside(what: str, make: Callable[[], dict[str, float]]) -> tuple[dict[str, float], str | None]:
    """Return what is made, or why there is none: a run does not fail for want of it."""
    try:
        return make(), None
    except ConfigError as error:
        reason = str(error)
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    print(f"this run has no {what} beside its measurement: {reason}")
    return {}, reason


def _resume(
    config: Config, folder: Path, strategy: Strategy, world: World, tokens_hash: str
) -> tuple[int, bool]:
    """Load the run's newest checkpoint, else that of config.resume; return its steps, and whether it is the run's."""
    began = time.perf_counter()
    # The model's random state, where no checkpoint has one: by default every rank of every seed would draw the same.
    torch.manual_seed(config.train.seed * configs.MANY + world.rank)
    taken = load_newest(folder, config.resume, strategy, world, tokens_hash=tokens_hash)
    if taken is None:
        return 0, False
    checkpoint, steps_done = taken
    seconds = time.perf_counter() - began
    print(f"rank {world.rank}: {checkpoint}, {steps_done} steps done, loaded in {seconds:.2f} s")
    return steps_done, checkpoint.is_relative_to(folder)


class NotFinite(ArithmeticError):
    """The loss or the gradient norm of a step is no number."""


def _while_finite(steps: Iterator[StepRecord]) -> Iterator[StepRecord]:
    """Yield the steps; raise NotFinite, in place of the first that is not, on all ranks alike (events.nan)."""
    for record in steps:
        if diverged_at([record]) is not None:
            what = f"loss {record.loss} and gradient norm {record.grad_norm} at step {record.step}"
            raise NotFinite(f"{what}; with events.nan=go_on the run goes on")
        yield record


def _run_steps(
    steps: Iterator[StepRecord],
    saver: Saver,
    world: World,
    folder: Path,
    start_step: int,
    is_own: bool,
) -> list[StepRecord]:
    """Run all steps and return their records.

    Each record is on the disk before the checkpoint of its step can become whole. is_own: the run began these steps.
    """
    # Pickled: as objects they would be a leak themselves, and garbage collection's work.
    records: list[bytes] = []
    writes = world.rank == 0
    writing = RecordWriter(folder, from_step=start_step, rests_on=is_own) if writes else None
    with writing or nullcontext() as writer:
        for record in steps:
            record.saving_seconds = saver.take_blocked_seconds()
            if writer:
                writer.write(record)
            records.append(pickle.dumps(record))
            if not saver.is_due(record.step + 1):
                continue
            progress.note_phase(record.step + 1, progress.SAVING)
            if writer:
                writer.sync()
            saver.async_save(record.step + 1)
    return [pickle.loads(record) for record in records]


def _summarise(
    folder: Path,
    world: World,
    records: list[StepRecord],
    facts: dict[str, Any],
    build_peak_bytes: int | None,
) -> None:
    """Write the summary on rank 0, with `facts` of the run beside its records.

    Times and losses cover the whole run; memory and traffic cover the steps since the last resume, which is all that
    every rank knows.
    """
    mine = summarise_rank(world.rank, records, build_peak_bytes=build_peak_bytes)
    all_ranks = worlds.gather_objects(mine)
    if world.rank == 0:
        write_summary(folder, replace(summarise(read_records(folder), all_ranks), **facts))


def _speed(config: Config, world: World, flops_per_step: float) -> dict[str, Any]:
    """Return the fields of the summary from which the utilisation of the ranks follows; all ranks call it."""
    dtype = torch.bfloat16 if config.precision.autocast else DTYPES[row_dtypes(config)[0]]
    peak = peak_flops(world, dtype, config.cluster.peak_tflops)
    return {"model_flops_per_step": flops_per_step, **peak}


def _send_output_to(log: Path) -> None:
    """Redirect standard output and error to `log` by their file descriptors, so that C++ prints there too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Both are line-buffered, so that a killed rank loses no line.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False, **TEXT)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, **TEXT)
