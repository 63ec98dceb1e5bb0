"""Bad arguments are refused before the engine touches a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroexp.comm.collectives import TRANSPORTS
from zeroexp.config.keys import ENGINE_SETTINGS
from zeroexp.cut.engine_rules import problems, why_not_over_all
from zeroexp.cut.layout import LAYOUTS
from zeroexp.cut.owners import OWNERS
from zeroexp.cut.stage import Placement, Stage
from zeroexp.interface.optimizer_trial import refuse_unless_elementwise
from zeroexp.interface.overlapping_memory import refuse_overlaps
from zeroexp.interface.values import Values
from zeroexp.process.world import World
from zeroexp.zero.observer import Arguments, Observer
from zeroexp.zero.options import DTYPES, Dtypes, Options, OuterOptimizer
from zeroexp.zero_safety.parameter_guards import is_guarded

WORDS = {
    "layout": LAYOUTS,
    "owners": OWNERS,
    "transport": TRANSPORTS,
    "optimizer_over": ("group", "all"),
    **{
        name: each["choices"] + (() if each["stands_for"] else (None,))
        for name, each in ENGINE_SETTINGS.items()
        if each.get("choices")
    },
}
TRAINED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_Replicated = DataParallel | DistributedDataParallel


class RefusedArguments(Observer):
    """Refuses what no engine can be built with."""

    def building(self, arguments: Arguments) -> None:
        """Raise ValueError in one line that names what is wrong, its value and the remedy."""
        module, groups, options = arguments.module, arguments.param_groups, arguments.options
        most = arguments.max_grad_norm
        _refuse_options(options, arguments.stage, arguments.world)
        if arguments.scales_loss and options.outer:
            problem = "with options.outer each replica would find a loss scale of its own"
            raise ValueError(f"scales_loss=True: {problem}; compute in bfloat16")
        _refuse_dtypes(arguments.dtypes)
        _refuse_missing_or_double_values(module, arguments.values)
        if most is not None and not (_is_number(most) and most > 0):
            raise ValueError(f"max_grad_norm={most!r}: use a number above 0, or None")
        _refuse_blocks(module, arguments.blocks)
        _refuse_tensors(module)
        _refuse_groups(groups, set(module.parameters()), options)
        if arguments.world.is_fake:  # the trial of the optimizer compares values
            return
        words = {group.get("layout", options.layout) for group in groups}
        cuts = not all(LAYOUTS[word].has_owners for word in words)
        if arguments.stage.optimizer is Placement.SHARD and arguments.world.size > 1:
            factory = arguments.optimizer_factory
            refuse_unless_elementwise(factory, groups, layout=options.layout, cut=cuts)


def _refuse_dtypes(dtypes: Dtypes | None) -> None:
    if dtypes is None:
        return
    if not isinstance(dtypes, Dtypes):
        raise ValueError(f"dtypes={dtypes!r}: give Dtypes(compute, reduce, master), or None")
    if not isinstance(dtypes.of_modules, Mapping):
        raise ValueError(
            f"Dtypes(of_modules={dtypes.of_modules!r}): give a dict of names and dtypes"
        )
    given = {name: getattr(dtypes, name) for name in ("compute", "reduce", "master")}
    for name, dtype in [*given.items(), *dtypes.of_modules.items()]:
        if dtype not in TRAINED_DTYPES:
            words = ", ".join(map(str, TRAINED_DTYPES))
            raise ValueError(f"Dtypes: the dtype {dtype!r} of {name!r}: use one of {words}")


def _refuse_tensors(module: nn.Module) -> None:
    for kind, tensors in (
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ):
        for name, tensor in tensors:
            if is_traceable_wrapper_subclass(tensor):
                raise ValueError(
                    f"{kind} {name} is a {type(tensor).__name__}: an engine holds plain tensors and shards them "
                    "itself, so build the model without fully_shard, parallelize_module or quantized weights"
                )
    for name, parameter in module.named_parameters():
        for problem in _problems_of(parameter):
            raise ValueError(f"parameter {name} {problem}")
    refuse_overlaps(module)


def _problems_of(parameter: nn.Parameter) -> Iterator[str]:
    if is_guarded(parameter):
        yield "belongs to another engine: build the model again for this one"
    is_lazy = isinstance(parameter, nn.UninitializedParameter)
    if is_lazy or parameter.layout is not torch.strided:
        problem = "has no values yet (a lazy or meta module), or is sparse"
        yield f"{problem}: materialize it before, an engine holds dense ones"
    if parameter.dtype not in TRAINED_DTYPES:
        problem = f"is of {parameter.dtype}: an engine holds floating-point parameters"
        yield f"{problem}; keep others as buffers"
    if parameter.is_inference():
        problem = "was made inside torch.inference_mode(), where nothing can be trained"
        yield f"{problem}: build the model outside of it"
    if parameter.requires_grad and parameter.grad is not None:
        yield "has a gradient already, which each rank would add: call model.zero_grad() before"


def _refuse_groups(
    param_groups: Sequence[dict[str, Any]], own: set[nn.Parameter], options: Options
) -> None:
    grouped: set[nn.Parameter] = set()
    for group in param_groups:
        if (layout := group.get("layout", options.layout)) not in LAYOUTS:
            raise ValueError(f"param_groups: layout={layout}: use {', '.join(LAYOUTS)}")
        over, words = group.get("over", options.optimizer_over), WORDS["optimizer_over"]
        if over not in words or ("over" in group and "kind" not in group):
            raise ValueError(
                f"param_groups: over={over}: use {', '.join(words)}, in a group that has a kind of its own"
            )
        if over == "all" and (why := why_not_over_all(options)):
            raise ValueError(f"param_groups: over=all: {'; '.join(why)}")
        _refuse_master(group, options)
        for parameter in group["params"]:
            if parameter not in own:
                raise ValueError(
                    f"param_groups hold a parameter of shape {list(parameter.shape)} that is none of the model's: "
                    "take them from this module's parameters()"
                )
            if parameter in grouped:
                raise ValueError(
                    f"param_groups hold a parameter of shape {list(parameter.shape)} twice: leave it in one group"
                )
        grouped.update(group["params"])


def _refuse_master(group: dict[str, Any], options: Options) -> None:
    """Require a known dtype of masters for a kind of its own, where masters need not have one dtype."""
    if (master := group.get("master")) is None:
        return
    if master not in DTYPES or "kind" not in group:
        raise ValueError(
            f"param_groups: master={master}: use {', '.join(DTYPES)}, in a group that has a kind of its own"
        )
    if options.offload or options.masters_rest or options.outer:
        raise ValueError(
            f"param_groups: master={master}: offload, masters_rest and outer take all masters in one dtype"
        )


def _refuse_missing_or_double_values(module: nn.Module, values: Values | None) -> None:
    """Require that all parameters have values and none are given, or that none has and they are given."""
    for name, parameter in module.named_parameters():
        if parameter.is_meta and values is None:
            raise ValueError(f"parameter {name} is on meta: give values=, or materialize it before")
        if values is not None and not parameter.is_meta:
            raise ValueError(
                f"parameter {name} has values already: build the model on meta, or give no values="
            )


def _refuse_blocks(module: nn.Module, blocks: Sequence[str]) -> None:
    known = dict(module.named_modules(remove_duplicate=False))
    for name, each in known.items():
        if isinstance(each, torch.jit.ScriptModule):
            raise ValueError(
                f"module {name or '(root)'} was made by torch.jit.script or trace: give the module it was made of"
            )
        if isinstance(each, _Replicated) or type(each).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                f"module {name or '(root)'} is a {type(each).__name__}, which reduces gradients itself: give "
                "the engine the module inside"
            )
    for name in blocks:
        if not isinstance(name, str):
            raise ValueError(
                f"blocks hold a {type(name).__name__}: name modules, as model.named_modules() does"
            )
        if name not in known or not name:
            near = ", ".join(list(dict(module.named_children()))[:8])
            raise ValueError(f"blocks={name!r}: the model has no such module; its own are {near}")
        # torch.compile(block) has a forward of its own, which its class lacks.
        if getattr(known[name].forward, "__func__", None) is nn.Module.forward:
            raise ValueError(
                f"blocks={name!r}: a {type(known[name]).__name__} has no forward that tells when its parameters "
                "are needed; name the modules in it"
            )
    if len({id(known[name]) for name in blocks}) < len(blocks):
        raise ValueError("blocks: a module is named twice; name each block once")


def _refuse_options(options: Options, stage: Stage, world: World) -> None:
    """Raise ValueError in one line that names the option, its value, what is wrong and what to use."""
    codes = options.gather_codec if options.masters_rest else None
    of_engine = problems(options, stage, world.size, codes=codes, group="options.")
    of_transport = _of_transport(options, world.device)
    for key, *problem in chain(_of_values(options), of_transport, of_engine):
        value = getattr(options, key)
        named = f"options.{key}={value if key in WORDS else repr(value)}"
        raise ValueError(f"{named}: {'; '.join(problem)}")


Problems = Iterator[tuple[str, str]]  # an option, and what is wrong with its value


def _of_values(options: Options) -> Problems:
    for key, words in WORDS.items():
        if getattr(options, key) not in words:
            yield key, f"use {', '.join(map(str, words))}"
    for key in ("overlap", "reductions_apart", "masters_rest", "error_feedback"):
        if not isinstance(getattr(options, key), bool):
            yield key, "use True or False"
    depth, size, num_ranks = options.prefetch, options.bucket_mb, options.secondary_partition
    if depth is not None and not (isinstance(depth, int) and depth >= 0):
        yield "prefetch", "use 0 or more units, or None"
    if size is not None and not (_is_number(size) and size > 0):
        yield "bucket_mb", "use a size in MiB above 0, or None"
    if not (_is_number(options.offload_fraction) and 0 < options.offload_fraction <= 1):
        yield "offload_fraction", "use a share above 0, up to 1"
    if type(options.replicas) is not int or options.replicas < 1:
        yield "replicas", "use a number of groups, 1 or more"
    if num_ranks is not None and (type(num_ranks) is not int or num_ranks < 2):
        yield "secondary_partition", "use the number of ranks of a node, 2 or more, or None"
    if (outer := options.outer) is None:
        return
    if not isinstance(outer, OuterOptimizer) or type(outer.every) is not int or outer.every < 1:
        yield "outer", "use OuterOptimizer(every=...) with 1 step or more"
    if not (_is_number(outer.lr) and outer.lr > 0 and _is_number(outer.momentum)):
        yield "outer", "use an lr above 0, as 0.7"
    if not 0 <= outer.momentum < 1:
        yield "outer", "use a momentum of 0 up to 1, as 0.9"


def _of_transport(options: Options, device: torch.device) -> Problems:
    if options.transport in ("direct", "gloo") and device.type != "cpu":
        yield "transport", f"it moves what lies on CPUs, and the model is for {device}; use auto"
    for what, is_set in (
        ("a codec saves nothing", options.gather_codec or options.reduce_codec),
        ("a secondary copy saves nothing", options.secondary_partition),
        ("no piece can be on the host", options.pieces_on_host),
        ("masters are not cast on their way", options.masters_rest),
    ):
        if is_set and options.transport == "direct":
            yield "transport", f"ranks read each other's memory, so that {what}; use auto"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
