"""`--explain`: one point broken down to units and tensors, what makes its peak, and what each lever would buy.

The point is rehearsed, which tells its peak. A lever is another value of one setting. Each is planned, so that its
price in traffic stands beside the model states that it saves; with `--rehearse` each is rehearsed too: then it has a
peak and a price in milliseconds, and levers that change nothing else are among them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from textwrap import wrap

from zeroexp.config.keys import Config, PrecisionConfig, resolve
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.stage import STAGES
from zeroexp.models.module import BuiltModel
from zeroexp.plan.outcome import Outcome, PlannedPoint, RehearsedPeaks
from zeroexp.plan.remedy import complete_words, plan_if_defined, with_stage, with_world
from zeroexp.sharding.grouping import group_parameters

MIB, WIDTH = 2**20, 80
PRECISIONS = {
    "fp32": ("float32", "float32", "float32"),
    "bf16_master": ("bfloat16", "float32", "float32"),
}
NUM_LARGEST = 3


@dataclass(frozen=True)
class Lever:
    words: str  # what to add to the command line
    num_bytes: float  # more than now, at the peak where it was rehearsed, else of model states; less where negative
    sent_bytes: float
    seconds: float | None = None  # of a step; None: it was not rehearsed


def explain(
    config: Config,
    model: BuiltModel,
    device: str,
    outcome: Outcome,
    named: Collection[str] = (),
    *,
    rehearses: bool = False,
) -> str:
    """Return the breakdown of one point as text.

    named: the keys that its line sets. rehearses: whether levers are rehearsed too.
    """
    kinds = {kind: spread.fullest for kind, spread in outcome.by_kind.items() if spread.fullest}
    levers = compute_levers(config, model, device, outcome, named, rehearses=rehearses)
    lines = [
        f"{outcome.name}, model {outcome.model}, {outcome.place} ranks. Planned, not measured.",
        "",
        f"The fullest rank holds {_mib(outcome.total.fullest)} MiB of model states at once; of each kind at most:",
        *[f"{_mib(num_bytes):>14}  {kind}" for kind, num_bytes in kinds.items()],
        "",
        *_rehearsed_lines(outcome),
        "",
        *_unit_lines(config, model),
        "",
        *_lever_lines(levers, outcome, rehearses=rehearses),
    ]
    return "\n".join(
        part for line in lines for part in (wrap(line, WIDTH) if len(line) > WIDTH else [line])
    )


def _rehearsed_lines(outcome: Outcome) -> list[str]:
    """Return what is held at the peak, by kind, and its largest storages; or why there is no peak."""
    if outcome.rehearsed is None:
        return [f"Its peak is not rehearsed: {outcome.not_rehearsed}."]
    peak = outcome.rehearsed.fullest
    return [
        f"Rehearsed, with activations: rank {peak.rank} holds {_mib(peak.num_bytes)} MiB at most, in {peak.phase}:",
        *[f"{_mib(num_bytes):>14}  {kind}" for kind, num_bytes in peak.by_kind.items()],
        "",
        "The largest storages there, and the operation that made each:",
        *[f"{_mib(size):>14}  {kind}, {made}" for size, kind, made in peak.largest[:NUM_LARGEST]],
    ]


def compute_levers(
    config: Config,
    model: BuiltModel,
    device: str,
    outcome: Outcome,
    named: Collection[str] = (),
    *,
    rehearses: bool = False,
) -> list[Lever]:
    """Return what every other value of a setting changes, largest saving first; undefined ones are left out."""
    found: list[Lever] = []
    now = outcome.rehearsed if rehearses else None
    changes = _changed_configs(config) if now is None else _all_changed_configs(config)
    for changing, changed in changes:
        planned = plan_if_defined(changed, model, device)
        if planned is None:
            continue
        other = planned.outcome
        words = complete_words(changing, config, changed, device, named)
        sent = other.sent.fullest - outcome.sent.fullest
        if now is None:
            found.append(Lever(words, other.total.fullest - outcome.total.fullest, sent))
        elif then := _rehearsed(planned):
            peak = then.fullest.num_bytes - now.fullest.num_bytes
            found.append(Lever(words, peak, sent, then.step_seconds[1] - now.step_seconds[1]))
    return sorted(found, key=lambda lever: lever.num_bytes)


def _rehearsed(planned: PlannedPoint) -> RehearsedPeaks | None:
    # The training loop takes a second to import.
    from zeroexp.plan.peak import with_rehearsal

    return with_rehearsal(*planned).rehearsed


def _changed_configs(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield the words of each lever and the point with it."""
    strategy = config.strategy
    gathers = strategy.parameters.placement == "shard"
    for stage in STAGES:
        if stage != strategy.name:
            yield f"strategy={stage}", with_stage(config, stage)
    yield f"world_size={2 * config.world_size}", with_world(config, 2 * config.world_size)
    if strategy.implementation not in LAYOUTS:
        return
    settings = {
        "unit": ("model", "block", "module"),
        "keep": ("none", "last", "all") if gathers else (),
        "prefetch": (0, 1, 2) if gathers and strategy.overlap else (),
        "bucket_mb": (1, 25, 100),
        "overlap": (True, False),
        "reduce_each": ("microbatch", "step"),
        "implementation": tuple(LAYOUTS),
    }
    for key, values in settings.items():
        for value in values:
            if value != getattr(strategy, key):
                word = str(value).lower() if isinstance(value, bool) else value
                yield f"strategy.{key}={word}", _with_value(config, key, value)


def _all_changed_configs(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield also the levers that change activations and products alone."""
    yield from _changed_configs(config)
    recomputes = not config.train.activation_checkpointing
    train = replace(config.train, activation_checkpointing=recomputes)
    words = f"train.activation_checkpointing={str(recomputes).lower()}"
    yield words, replace(config, train=train)
    micro, each = config.data.micro_batch_size, config.data.global_batch_size // config.world_size
    for samples in (micro // 2, 2 * micro):
        if samples and each % samples == 0:
            data = replace(config.data, micro_batch_size=samples)
            yield f"data.micro_batch_size={samples}", replace(config, data=data)
    for name, dtypes in PRECISIONS.items():
        if name != config.precision.name:
            yield f"precision={name}", _with_dtypes(config, name, *dtypes)


def _with_dtypes(config: Config, name: str, compute: str, reduce: str, master: str) -> Config:
    config = deepcopy(config)
    config.precision = PrecisionConfig(name, compute, reduce, master)
    rows = (config.strategy.parameters, config.strategy.gradients, config.strategy.optimizer)
    for row, dtype in zip(rows, (compute, reduce, master), strict=True):
        row.dtype = dtype
    return config


def _with_value(config: Config, key: str, value: object) -> Config:
    config = deepcopy(config)
    strategy = config.strategy
    setattr(strategy, key, value)
    if not LAYOUTS[strategy.implementation].has_owners:
        strategy.owners = None
    if not strategy.overlap:
        strategy.prefetch = None
    return resolve(config)


def _unit_lines(config: Config, model: BuiltModel) -> list[str]:
    """Return a line for each unit of another size, and the largest tensors."""
    groups = group_parameters(model.module, model.blocks, config.strategy.unit or "block")
    sizes = {group.name: sum(p.numel() for p in group.parameters.values()) for group in groups}
    alike: dict[int, list[str]] = {}
    for name, numel in sizes.items():
        alike.setdefault(numel, []).append(name or "(root)")
    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[config.strategy.parameters.dtype]
    lines = ["Units, whole, in MiB:"]
    for numel, names in alike.items():
        what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} like it"
        lines.append(f"{_mib(numel * itemsize):>14}  {what}")
    tensors = [(p.numel(), name) for name, p in model.module.named_parameters()]
    lines += ["", "Largest tensors, whole, in MiB:"]
    for numel, name in sorted(tensors, key=lambda pair: -pair[0])[:NUM_LARGEST]:
        lines.append(f"{_mib(numel * itemsize):>14}  {name}")
    return lines


def _lever_lines(rows: Sequence[Lever], outcome: Outcome, *, rehearses: bool) -> list[str]:
    rehearsed = outcome.rehearsed if rehearses else None
    told = "MiB of the fullest rank, and ms of a step"
    lines = [f"What each lever would change, in {told}:", _basis(outcome, rehearses), ""]
    lines.append(
        f"{'states' if rehearsed is None else 'peak':>12} {'sent/step':>12} {'ms':>10}  lever"
    )
    for lever in rows:
        held, sent = (
            f"{num_bytes / MIB:+z,.1f}" for num_bytes in (lever.num_bytes, lever.sent_bytes)
        )
        ms = "-" if lever.seconds is None else f"{1e3 * lever.seconds:+z,.1f}"
        if any(cell.strip("+-0.,") for cell in (held, sent, ms)):
            lines += wrap(
                f"{held:>12} {sent:>12} {ms:>10}  {lever.words}",
                WIDTH,
                subsequent_indent=" " * 39,
                break_on_hyphens=False,
            )
    return lines


def _basis(outcome: Outcome, rehearses: bool) -> str:
    """Return what the numbers of levers rest on, or why there are no milliseconds."""
    if not rehearses or outcome.rehearsed is None:
        reason = "no lever was rehearsed; add --rehearse"
        if rehearses:
            reason = str(outcome.not_rehearsed)
        return f"model states and what is sent, by closed forms. ms is - since {reason}."
    peak, seconds = outcome.rehearsed.fullest.num_bytes, outcome.rehearsed.step_seconds[1]
    return (
        f"rehearsed, with activations: now {_mib(peak)} MiB and {1e3 * seconds:,.1f} ms, predicted "
        f"({outcome.rehearsed.speed})."
    )


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.1f}"
