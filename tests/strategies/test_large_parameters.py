"""What nearly every real model has and the toy has not: parameters larger than a bucket, more words than tokens.

Each row is trained three steps on real ranks and equals the oracle bit for bit.
"""

from __future__ import annotations

import pytest

from tests.models_for_tests import MANY_WORDS, SAMPLES, SEQ_LEN, WIDTH
from tests.strategies.test_parity import AXES, check
from zeroexp.cut.stage import STAGES
from zeroexp.zero.options import MIB

PLAIN = {name: values[0] for name, values in AXES.items()}
every_stage = pytest.mark.parametrize("stage", list(STAGES))


@every_stage
def test_a_parameter_larger_than_its_bucket(ranks, stage):
    """Of 35 elements in buckets of 10; its whole gradient is needed until its first range has left."""
    rows = [
        {
            **PLAIN,
            "stage": stage,
            "layout": layout,
            "world_size": 2,
            "bucket_mb": 10 * 4 / MIB,
            "transport": transport,
            "reduce_each": "step" if stage == "zero1" else "microbatch",
        }
        for layout, transport in (("tensor", "gloo"), ("buffer", "direct"))
    ]
    check(ranks, rows)


@every_stage
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_tied_embedding_of_more_words_than_tokens(ranks, stage, world_size):
    """The rows of its lookup reach the gradient beside autograd, and before anybody asks for the whole of it."""
    assert SAMPLES * SEQ_LEN < MANY_WORDS
    rows = [
        {
            **PLAIN,
            "stage": stage,
            "layout": layout,
            "world_size": world_size,
            "model": "words",
            "unit": unit,
            "bucket_mb": bucket_mb,
        }
        for layout, unit, bucket_mb in (
            ("buffer", "block", None),
            ("tensor", "model", None),
            ("parameter", "module", WIDTH * MANY_WORDS / MIB),  # a quarter of the embedding
        )
    ]
    check(ranks, rows)
