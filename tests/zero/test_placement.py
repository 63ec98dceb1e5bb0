"""The stage table: every move of every stage, spelt out, and the rows that mean nothing."""

from __future__ import annotations

from itertools import product

import pytest

from zeroexp.cut.stage import STAGES, Move, Placement, Stage, is_stage, move_between

NOTHING, GATHER, SCATTER = Move.NOTHING, Move.ALL_GATHER, Move.REDUCE_SCATTER
ALL_REDUCE, SLICE = Move.ALL_REDUCE, Move.SLICE

# gather, reduce, hand_over, publish: the table of zeroexp/zero/__init__.py
TABLE = {
    "ddp": (NOTHING, ALL_REDUCE, NOTHING, NOTHING),
    "zero1_allreduce": (NOTHING, ALL_REDUCE, SLICE, GATHER),
    "zero1": (NOTHING, NOTHING, SCATTER, GATHER),
    "zero2": (NOTHING, SCATTER, NOTHING, GATHER),
    "zero3": (GATHER, SCATTER, NOTHING, NOTHING),
}


@pytest.mark.parametrize("name", TABLE)
def test_moves_of_a_stage(name):
    stage = STAGES[name]
    assert (stage.gather, stage.reduce, stage.hand_over, stage.publish) == TABLE[name]


def test_the_table_has_no_other_stage():
    assert set(STAGES) == set(TABLE)


def test_words_of_the_config_make_the_known_stages_and_no_others():
    words = [placement.value for placement in Placement]
    known = {str(stage): stage for stage in STAGES.values()}
    assert len(known) == 5
    for row in product(words, words, words):
        if ",".join(row) in known:
            assert Stage.of(*row) == known[",".join(row)]
        else:
            with pytest.raises(ValueError, match=rf"placements={','.join(row)}.*zero2 = replicate"):
                Stage.of(*row)


def test_a_stage_of_a_plugin_owns_all_of_the_optimizer_or_a_section_of_it():
    whole, shard = Placement.REPLICATE, Placement.SHARD
    carried_out = {row for row in product(Placement, repeat=3) if is_stage(Stage(*row))}
    sharded = set(product((whole, shard), Placement, (shard,)))
    assert carried_out == {(whole, whole, whole), *sharded}


def test_an_unknown_word_is_refused():
    with pytest.raises(ValueError, match="scatter"):
        Stage.of("replicate", "scatter", "shard")


MOVES = {
    (Placement.SHARD, Placement.REPLICATE): GATHER,
    (Placement.PARTIAL, Placement.SHARD): SCATTER,
    (Placement.PARTIAL, Placement.REPLICATE): ALL_REDUCE,
    (Placement.REPLICATE, Placement.SHARD): SLICE,
}


@pytest.mark.parametrize(("now", "needed"), list(product(Placement, Placement)))
def test_every_pair_of_placements_has_one_move_or_none(now, needed):
    if now is needed:
        assert move_between(now, needed) is NOTHING
    elif (now, needed) in MOVES:
        assert move_between(now, needed) is MOVES[now, needed]
    else:
        with pytest.raises(ValueError, match=f"from {now.value} to {needed.value}"):
            move_between(now, needed)
