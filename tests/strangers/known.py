"""What is neither right nor refused in a clear line: scenario -> where, and what happens.

docs/library.md lists each kind with its reason.
"""

REPLICATED = ("ddp", "zero1_allreduce", "zero1", "zero2")
EVERYWHERE = (*REPLICATED, "zero3")

SHOWS_OLD_VALUES = "an alias kept across a step shows what lay there when it was made"
NO_GRADIENT = "a hook after accumulation that came later finds no gradient"
OTHER_RANKS_WAIT = "rank 1 is refused, rank 0 waits for it"

# The stage as in a setting's name, or with the unit behind it.
KNOWN_TODAY: dict[str, tuple[tuple[str, ...], str]] = {
    "read_by_vmap": (("zero3",), "torch.vmap takes the parameter as it lies in memory"),
    "a_view_kept_from_the_context": (("zero3",), SHOWS_OLD_VALUES),
    "a_hook_after_accumulation_that_scales_registered_after": (EVERYWHERE, NO_GRADIENT),
    "an_optimizer_inside_backward_registered_after": (REPLICATED, NO_GRADIENT),
    "an_error_on_one_rank_and_then_on_forward": (EVERYWHERE, OTHER_RANKS_WAIT),
    "an_error_on_one_rank_and_then_on_backward": (EVERYWHERE, OTHER_RANKS_WAIT),
}


def known(name: str, stage: str, unit: str) -> str | None:
    """Why this scenario may fail under this stage and unit; None: it may not."""
    where, reason = KNOWN_TODAY.get(name, ((), ""))
    return reason if stage in where or f"{stage}-{unit}" in where else None
