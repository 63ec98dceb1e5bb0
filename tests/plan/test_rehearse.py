"""A rehearsal holds and sends, to the byte, what the closed forms say, in every stage, layout and unit."""

from __future__ import annotations

import itertools

import pytest

from tests.composing import composed
from zeroexp.config import Config, ConfigError
from zeroexp.plan.form import form_of, on_meta
from zeroexp.plan.place import Place, Shape
from zeroexp.plan.predict import Form
from zeroexp.plan.rehearse import RankRehearsal, rehearse

NUM_RANKS = 4
WORDS = ["model=tiny", "data=synthetic", "data.seq_len=16", "data.global_batch_size=8"]
STAGES = ("ddp", "zero1_allreduce", "zero1", "zero2", "zero3")
LAYOUTS = ("parameter", "tensor", "buffer")


def config_of(*words: str) -> Config:
    return composed(*WORDS, f"world_size={NUM_RANKS}", *words)


def form(config: Config) -> Form:
    found = form_of(config, on_meta(config), Place("cuda", Shape(1, NUM_RANKS)))
    assert isinstance(found, Form)
    return found


def agree(rehearsed: RankRehearsal, expected: Form) -> None:
    for moment, held in rehearsed.held_bytes.items():
        assert held == expected.held_bytes(moment, rehearsed.rank), moment
    sent = dict(rehearsed.traffic.bytes_by_kind)
    sent.pop("loss")
    assert sent == expected.traffic(rehearsed.rank).bytes_by_kind


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", STAGES)
def test_states_and_traffic_are_those_of_the_closed_forms(stage, layout):
    config = config_of(f"strategy={stage}", f"strategy.implementation={layout}")
    for rehearsed in rehearse(config).ranks:
        agree(rehearsed, form(config))
