"""`--explain`: one point broken down to units and tensors, what makes its peak, and what each lever would buy.

A lever is another value of one setting. Each is planned, so that its price in traffic stands beside what it saves. If
the point was rehearsed, so is each lever: its peak then has activations, and it has a price in milliseconds.
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
from zeroexp.plan.outcome import Outcome, RehearsedPeaks
from zeroexp.plan.remedy import complete_words, plan_point_with_form, with_stage, with_world
from zeroexp.sharding.grouping import group_parameters

MIB, WIDTH = 2**20, 80
PRECISIONS = {
    "fp32": ("float32", "float32", "float32"),
    "bf16_master": ("bfloat16", "float32", "float32"),
}
NUM_LARGEST = 3

MEANS = {
    "parameters": "weights at rest",
    "gradients": "gradients where they rest",
    "optimizer": "the optimizer's moments",
    "master": "weights of the master's dtype",
    "pools": "memory in which units take turns while they are gathered; each is as large as its largest unit",
    "kept units": "units gathered outside of pools: those that are kept, or inside of which others run",
    "shared slots": "memory in which the ranks of one host read each other's gradients",
    "unreduced gradients": "gradients that backward adds up until the last microbatch",
    "unit's gradients": "the largest unit's gradients before they are reduced",
    "cast to reduce": "those gradients in the dtype that travels",
    "messages": "the largest reduction's messages, as many as are in flight",
    "gradients in flight": "gradients that a reduction in flight still reads",
    "gather messages": "messages of several chunks that are gathered at once, as many as are in flight",
    "pages": "what weights leave unused of the pages that the ranks of one host share",
    "cast to master": "all reduced gradients of this rank in the master's dtype, for the step",
    "hidden buckets": "DDP's buckets, a copy of all gradients that no tensor list shows",
    "largest gradient": "the gradient that backward has just made",
    "gathered units": "units that FSDP2 has gathered",
}


@dataclass(frozen=True)
class Lever:
    words: str  # what to add to the command line
    peak_bytes: float  # more than now; less where negative; with activations where it was rehearsed
    sent_bytes: float
    seconds: float | None = None  # of a step; None: nothing was rehearsed


def explain(
    config: Config,
    model: BuiltModel,
    device: str,
    outcome: Outcome,
    named: Collection[str] = (),
) -> str:
    """Return the breakdown of one point as text. `named` are the keys that its line sets."""
    largest = list(outcome.peak_terms.items())[:NUM_LARGEST]
    lines = [
        f"{outcome.name}, model {outcome.model}, {outcome.place} ranks. Planned, without activations.",
        "",
        f"The fullest rank holds {_mib(outcome.peak.fullest)} MiB at most, in {outcome.peak_phase}:",
        *[f"{_mib(num_bytes):>14}  {term}" for term, num_bytes in outcome.peak_terms.items()],
        "",
        "The largest terms:",
        *[f"  {term}: {MEANS.get(term, term)}." for term, _ in largest],
        "",
        *(_rehearsed_lines(outcome.rehearsed) if outcome.rehearsed else []),
        *_unit_lines(config, model),
        "",
        *_lever_lines(compute_levers(config, model, device, outcome, named), outcome),
    ]
    return "\n".join(
        part for line in lines for part in (wrap(line, WIDTH) if len(line) > WIDTH else [line])
    )


def _rehearsed_lines(rehearsed: RehearsedPeaks) -> list[str]:
    """Return what is held at the rehearsed peak, by kind, and its largest storages."""
    peak = rehearsed.fullest
    return [
        f"Rehearsed, with activations: rank {peak.rank} holds {_mib(peak.num_bytes)} MiB at most, in {peak.phase}:",
        *[f"{_mib(num_bytes):>14}  {kind}" for kind, num_bytes in peak.by_kind.items()],
        "",
        "The largest storages there, and the operation that made each:",
        *[f"{_mib(size):>14}  {kind}, {made}" for size, kind, made in peak.largest[:NUM_LARGEST]],
        "",
    ]


def compute_levers(
    config: Config,
    model: BuiltModel,
    device: str,
    outcome: Outcome,
    named: Collection[str] = (),
) -> list[Lever]:
    """Return what every other value of a setting changes, largest saving first; undefined ones are left out."""
    found: list[Lever] = []
    changes = (
        _changed_configs(config) if outcome.rehearsed is None else _all_changed_configs(config)
    )
    for changing, changed in changes:
        other = _plan_alike(changed, model, device, outcome)
        if other is None:
            continue
        words = complete_words(changing, config, changed, device, named)
        sent = other.sent.fullest - outcome.sent.fullest
        if other.rehearsed is None or outcome.rehearsed is None:
            found.append(Lever(words, other.peak.fullest - outcome.peak.fullest, sent))
            continue
        now, then = outcome.rehearsed, other.rehearsed
        peak = then.fullest.num_bytes - now.fullest.num_bytes
        found.append(Lever(words, peak, sent, then.step_seconds[1] - now.step_seconds[1]))
    return sorted(found, key=lambda lever: lever.peak_bytes)


def _plan_alike(config: Config, model: BuiltModel, device: str, outcome: Outcome) -> Outcome | None:
    """Plan a lever as the point was, with a rehearsal or without; None if it is not defined that way."""
    found = plan_point_with_form(config, model, device)
    if found is None or outcome.rehearsed is None:
        return None if found is None else found[2]
    # The training loop takes a second to import.
    from zeroexp.plan.peak import with_rehearsal

    other = with_rehearsal(config, *found)
    return other if other.rehearsed else None


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
    """Yield also the levers that no closed form knows, since they change activations and products."""
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


def _lever_lines(rows: Sequence[Lever], outcome: Outcome) -> list[str]:
    told = "MiB of the fullest rank, and ms of a step"
    lines = [f"What each lever would change, in {told}:", _basis(outcome), ""]
    lines.append(f"{'peak':>12} {'sent/step':>12} {'ms':>10}  lever")
    for lever in rows:
        peak, sent = (
            f"{num_bytes / MIB:+z,.1f}" for num_bytes in (lever.peak_bytes, lever.sent_bytes)
        )
        ms = "-" if lever.seconds is None else f"{1e3 * lever.seconds:+z,.1f}"
        if any(cell.strip("+-0.,") for cell in (peak, sent, ms)):
            lines += wrap(
                f"{peak:>12} {sent:>12} {ms:>10}  {lever.words}",
                WIDTH,
                subsequent_indent=" " * 39,
                break_on_hyphens=False,
            )
    return lines


def _basis(outcome: Outcome) -> str:
    """Return what the numbers of levers rest on, or why there are no milliseconds."""
    if outcome.rehearsed is None:
        reason = outcome.not_rehearsed or "nothing was rehearsed; add --rehearse"
        return f"without activations, by closed forms. ms is - since {reason}."
    peak, seconds = outcome.rehearsed.fullest.num_bytes, outcome.rehearsed.step_seconds[1]
    return (
        f"rehearsed, with activations: now {_mib(peak)} MiB and {1e3 * seconds:,.1f} ms, predicted "
        f"({outcome.rehearsed.speed})."
    )


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:,.1f}"
