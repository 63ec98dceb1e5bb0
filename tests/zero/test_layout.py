"""Layouts as arithmetic: every element has exactly one owner, whatever the sizes and the number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroexp.comm.shared_memory_sizes import ALIGNMENT_BYTES, aligned
from zeroexp.cut.check_chunks import refuse_chunks
from zeroexp.cut.chunk import Chunk, ParameterSpec
from zeroexp.cut.layout import by_parameter, lay_out
from zeroexp.cut.moment_blocks import BLOCK
from zeroexp.cut.owners import _require_owners, fullest_bytes, own_contiguously, own_greedily

FAMILIES = ["parameter", "tensor", "buffer"]
MIB = 1 << 20

numels = st.one_of(st.integers(1, 5), st.integers(1, 10_000))
kinds = st.sampled_from(["trainable", "frozen", "int8"])  # of int8, moments are in blocks


@st.composite
def units_of_parameters(draw):
    """Units of parameters with odd sizes, some smaller than the number of ranks; the root may be empty."""
    units = draw(st.lists(st.lists(st.tuples(numels, kinds), max_size=7), min_size=1, max_size=4))
    return [
        [ParameterSpec(f"unit{u}.{i}", numel, 4, kind) for i, (numel, kind) in enumerate(unit)]
        for u, unit in enumerate(units)
    ]


layouts = {
    "family": st.sampled_from(FAMILIES),
    "units": units_of_parameters(),
    "world_size": st.integers(1, 9),
    "owners": st.sampled_from(["contiguous", "greedy"]),
}


def owned_elements(chunk: Chunk, rank: int) -> list[tuple[str, int]]:
    """(parameter, element) of everything `rank` owns of the chunk."""
    return [
        (chunk.members[span.member].name, element)
        for span in chunk.spans(rank)
        for element in range(span.start, span.stop)
    ]


@settings(max_examples=60, deadline=None)
@given(**layouts)
def test_every_element_of_every_parameter_has_exactly_one_owner(family, units, world_size, owners):
    for unit, chunks in zip(units, lay_out(family, units, world_size, owners=owners), strict=True):
        owned = [e for c in chunks for rank in range(world_size) for e in owned_elements(c, rank)]
        assert sorted(owned) == sorted((spec.name, i) for spec in unit for i in range(spec.numel))


@settings(max_examples=60, deadline=None)
@given(**layouts)
def test_sections_follow_one_another_and_padding_is_less_than_one_element_a_rank(
    family, units, world_size, owners
):
    for chunks in lay_out(family, units, world_size, owners=owners):
        for chunk in chunks:
            assert chunk.cuts[0] == 0
            assert len(chunk.cuts) == world_size + 1
            assert list(chunk.cuts) == sorted(chunk.cuts)
            assert 0 <= chunk.padded_numel - chunk.unpadded_numel < world_size
            assert chunk.even or family == "parameter" or chunk.kind == "int8"
            if family == "parameter":
                assert chunk.padded_numel == chunk.unpadded_numel, (
                    "whole parameters need no padding"
                )


@settings(max_examples=60, deadline=None)
@given(**layouts)
def test_spans_lie_in_their_section_where_they_say(family, units, world_size, owners):
    for chunks in lay_out(family, units, world_size, owners=owners):
        for chunk in chunks:
            for rank in range(world_size):
                section, real = chunk.section(rank), chunk.real_section(rank)
                assert (real.start, real.stop) == tuple(
                    min(bound, chunk.unpadded_numel) for bound in (section.start, section.stop)
                )
                assert sum(s.numel for s in chunk.spans(rank)) == real.stop - real.start
                for span in chunk.spans(rank):
                    member = chunk.members[span.member]
                    assert section.start + span.offset == member.start + span.start
                    assert span.start < span.stop <= member.stop - member.start


@settings(max_examples=60, deadline=None)
@given(**layouts)
def test_members_lie_side_by_side_and_share_a_kind(family, units, world_size, owners):
    for unit, chunks in zip(units, lay_out(family, units, world_size, owners=owners), strict=True):
        spec_of = {spec.name: spec for spec in unit}
        for chunk in chunks:
            end = 0
            for member, whole in zip(chunk.members, chunk.whole(), strict=True):
                assert member.start == end == whole.offset
                end = member.stop
                assert member.stop - member.start == spec_of[member.name].numel == whole.numel
                assert spec_of[member.name].kind == chunk.kind
            assert end == chunk.unpadded_numel


@settings(max_examples=60, deadline=None)
@given(**layouts)
def test_no_block_of_moments_is_cut_and_none_changes_its_owner_for_nothing(
    family, units, world_size, owners
):
    """As the even cut where that lies between blocks, else less than a block before it."""
    for chunks in lay_out(family, units, world_size, owners=owners):
        for chunk in (chunk for chunk in chunks if chunk.kind == "int8"):
            starts = {span.start for rank in range(world_size) for span in chunk.spans(rank)}
            assert not any(start % BLOCK for start in starts)
            if family != "parameter":
                per_rank = -(-chunk.unpadded_numel // world_size)
                moved = [per_rank * rank - cut for rank, cut in enumerate(chunk.cuts)]
                assert min(moved) >= 0 and max(moved) < BLOCK and moved[-1] == 0


def test_a_layout_of_others_that_cuts_a_block_is_refused():
    unit = [ParameterSpec("a", 6, 4, "int8"), ParameterSpec("b", 600, 4, "int8")]
    (chunk,) = lay_out("buffer", [unit], 2)[0]
    assert chunk.cuts == (0, 262, 606)  # behind the first block of b
    refuse_chunks("mine", (chunk,), unit, 2)
    with pytest.raises(ValueError, match="mine: cuts b before element 297; cut kind 'int8' at"):
        refuse_chunks("mine", (replace(chunk, cuts=(0, 303, 606)),), unit, 2)


def test_sections_of_whole_blocks_stay_even():
    """As those of real models, whose sides are multiples of 256: 6 blocks and 2 of 256 elements on 4 ranks."""
    unit = [ParameterSpec(name, BLOCK * num, 4, "int8") for name, num in (("a", 6), ("b", 2))]
    for chunk in lay_out("buffer", [unit], 4)[0]:
        assert chunk.even and chunk.padded_numel == 8 * BLOCK


def test_owners_are_the_ranks_from_the_first_to_the_last():
    specs = [ParameterSpec(name, 4, 4) for name in "ab"]
    _require_owners("strategy.owners=others", {"a": 0, "b": 1}, specs, 2)
    for rank in (-1, 2, True):
        with pytest.raises(ValueError, match=f"gives b to rank {rank}; use 0 to 1"):
            _require_owners("strategy.owners=others", {"a": 0, "b": rank}, specs, 2)


def test_parameter_level_gives_each_parameter_to_its_owner():
    unit = [ParameterSpec(name, numel, 4) for name, numel in (("a", 6), ("b", 2), ("c", 3))]
    (chunk,) = by_parameter(unit, 3, {"a": 1, "b": 2, "c": 1})
    owned = [[chunk.members[span.member].name for span in chunk.spans(rank)] for rank in range(3)]
    assert owned == [[], ["a", "c"], ["b"]]


@settings(max_examples=60, deadline=None)
@given(units=units_of_parameters(), world_size=st.integers(1, 9))
def test_parameter_level_keeps_parameters_whole(units, world_size):
    for owners in ("contiguous", "greedy"):
        for chunks in lay_out("parameter", units, world_size, owners=owners):
            spans = [(c, s) for c in chunks for r in range(world_size) for s in c.spans(r)]
            for chunk, span in spans:
                member = chunk.members[span.member]
                assert (span.start, span.stop) == (0, member.stop - member.start)


@settings(max_examples=100, deadline=None)
@given(units=units_of_parameters(), world_size=st.integers(1, 9))
def test_greedy_owners_are_never_worse_than_contiguous(units, world_size):
    specs = [spec for unit in units for spec in unit]
    greedy, contiguous = own_greedily(specs, world_size), own_contiguously(specs, world_size)
    assert set(greedy) == set(contiguous) == {spec.name for spec in specs}
    assert all(owner in range(world_size) for owner in (greedy | contiguous).values())
    assert fullest_bytes(specs, greedy) <= fullest_bytes(specs, contiguous)


def test_greedy_gives_the_largest_first_to_the_least_loaded():
    specs = [
        ParameterSpec(name, numel, 4) for name, numel in zip("abcde", (1, 2, 8, 5, 4), strict=True)
    ]
    # 8 -> rank 0; 5 -> rank 1; 4 -> rank 1 (5 < 8); 2 -> rank 0 (8 < 9); 1 -> rank 1 (9 < 10)
    assert own_greedily(specs, 2) == {"c": 0, "d": 1, "e": 1, "b": 0, "a": 1}
    assert fullest_bytes(specs, own_greedily(specs, 2)) == 10 * 4
    # a, b, c | d, e
    assert fullest_bytes(specs, own_contiguously(specs, 2)) == 11 * 4


def test_greedy_falls_back_to_contiguous_where_that_is_better():
    """Longest-first is not optimal: 7 7 | 6 6 ... is a case where equal consecutive halves win."""
    specs = [
        ParameterSpec(name, numel, 1) for name, numel in zip("abcde", (3, 3, 2, 2, 2), strict=True)
    ]
    # longest first: a -> 0, b -> 1, c -> 0, d -> 1, e -> 0: 7 against 5; contiguous a b c | d e: 8 against 4
    assert fullest_bytes(specs, own_greedily(specs, 2)) == 7
    reordered = [specs[i] for i in (2, 3, 4, 0, 1)]  # c d e | a b: 6 and 6
    assert fullest_bytes(reordered, own_greedily(reordered, 2)) == 6


def test_buffer_of_the_docstring():
    specs = [ParameterSpec(n, k, 4) for n, k in (("a", 4), ("b", 3), ("c", 3))]
    (chunk,) = lay_out("buffer", [specs], 4)[0]
    assert chunk.cuts == (0, 3, 6, 9, 12)
    assert chunk.real_section(3) == slice(9, 10)
    assert [(chunk.members[s.member].name, s.start, s.stop, s.offset) for s in chunk.spans(1)] == [
        ("a", 3, 4, 0),
        ("b", 0, 2, 1),
    ]


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65, 1000])
def test_aligned_is_the_next_multiple(num_bytes):
    assert aligned(num_bytes) % ALIGNMENT_BYTES == 0
    assert 0 <= aligned(num_bytes) - num_bytes < ALIGNMENT_BYTES


# -- published numbers -------------------------------------------------------------------------------


def smollm2_360m(*, num_labels: int | None = None) -> list[ParameterSpec]:
    """SmolLM2-360M in the order of its modules; embedding tied, or a head of `num_labels` of its own."""
    width, inner, words, key_values = 960, 2560, 49152, 5 * 64
    block = [width * width, key_values * width, key_values * width, width * width]  # q, k, v, o
    block += [inner * width] * 3 + [width] * 2  # gate, up, down, two norms
    head = [] if num_labels is None else [num_labels * width]
    numels = [words * width, *(block * 32), width, *head]
    return [ParameterSpec(str(index), numel, 4) for index, numel in enumerate(numels)]


def test_smollm2_360m_on_two_ranks():
    """361,821,120 parameters in 290 tensors. Equal counts of tensors leave one rank with 780 MiB of them."""
    specs = smollm2_360m()
    assert (sum(spec.numel for spec in specs), len(specs)) == (361_821_120, 290)
    assert round(sum(spec.numel * 4 for spec in specs) / MIB, 2) == 1380.24
    assert round(fullest_bytes(specs, own_contiguously(specs, 2)) / MIB) == 780
    assert round(fullest_bytes(specs, own_greedily(specs, 2)) / MIB) == 690


@pytest.mark.parametrize(
    ("stage", "replicated", "owned", "fullest_mib"),
    [("zero1", 8, 8, 4327.78), ("zero2", 4, 12, 3731.16), ("zero3", 0, 16, 3134.53)],
)
def test_fullest_rank_of_the_published_table(stage, replicated, owned, fullest_mib):
    """With a head of five labels, contiguous owners. Bytes a parameter: itself 4, gradient 4, Adam 8."""
    specs = smollm2_360m(num_labels=5)
    assert (sum(spec.numel for spec in specs), len(specs)) == (361_825_920, 291)
    fullest = fullest_bytes(specs, own_contiguously(specs, 2)) // 4
    num_bytes = replicated * sum(spec.numel for spec in specs) + owned * fullest
    # the published totals add columns that were rounded one by one, to 0.005 each
    assert num_bytes / MIB == pytest.approx(fullest_mib, abs=0.01), stage
