"""What torch's engines hold, to the byte, and what their labels say."""

from __future__ import annotations

import pytest
import torch

from tests.engines import HSDP, NATIVE, check
from tests.models_for_tests import MODELS, microbatch_of
from tests.oracle import Make, Recipe, build_on_rank, configured, run_steps
from tests.ranks import RankError
from zeroexp.config.optimizer import optimizer_factory, parameter_groups
from zeroexp.engines.torch_ddp import TorchDDP
from zeroexp.measure.memory import bytes_by_kind
from zeroexp.models.loss import loss_sum
from zeroexp.process.world import World

MODULE = MODELS["toy"].build().module
SHAPES = [tuple(p.shape) for p in MODULE.parameters()]
TRAINED = [p for p in MODULE.parameters() if p.requires_grad]
WITH_GRADIENT = [p for name, p in MODULE.named_parameters() if p.requires_grad and name != "unused"]
STEP_BYTES = 4  # of one float32 count for each tensor that AdamW updates


def num_bytes(parameters: list[torch.nn.Parameter]) -> int:
    return sum(p.nbytes for p in parameters)


def rows_bytes(shape: tuple[int, ...], rank: int, world_size: int) -> int:
    """FSDP2 cuts dim 0 as torch.chunk does: ceil(rows / N) each, and the last ranks get what is left."""
    rows = -(-shape[0] // world_size)
    mine = max(0, min(rows, shape[0] - rank * rows))
    return mine * 4 * torch.Size(shape[1:]).numel()


def moments_held(world: World, make: Make) -> dict[str, dict[str, int]]:
    """Bytes by kind at each moment of the second step, one microbatch."""
    recipe = Recipe(accumulation=1)
    strategy = build_on_rank(world, recipe, make)
    run_steps(strategy, world, recipe, range(1))
    held = {"at_rest": bytes_by_kind(strategy.model_states())}
    with strategy.microbatch(last=True):
        tokens, labels = microbatch_of(1, 0, world.rank)
        loss = loss_sum(strategy.model(tokens), labels, "causal")
        held["after_forward"] = bytes_by_kind(strategy.model_states())
        strategy.backward(loss)
    held["after_backward"] = bytes_by_kind(strategy.model_states())
    strategy.step()
    held["after_step"] = bytes_by_kind(strategy.model_states())
    return held


def engine_of(world: World, make: Make) -> str:
    return build_on_rank(world, Recipe(), make).settings["engine"]


@pytest.mark.parametrize("as_view", [True, False])
def test_ddp_holds_everything_and_its_buckets(ranks, as_view):
    p, frozen = (
        num_bytes(TRAINED),
        num_bytes([x for x in MODULE.parameters() if not x.requires_grad]),
    )
    gradients = num_bytes(WITH_GRADIENT)
    moments = 2 * gradients + STEP_BYTES * len(WITH_GRADIENT)
    make = configured("ddp", "torch", gradient_as_bucket_view=as_view)
    for held in ranks(moments_held, make):
        for moment, kinds in held.items():
            assert kinds["parameters"] == p + frozen
            assert kinds["optimizer"] == moments
            if moment in ("at_rest", "after_forward"):
                assert (kinds["gradients"], kinds["buffers"]) == (0, p)
            elif as_view:
                # A view keeps its whole bucket alive, and all of this model is one bucket.
                assert (kinds["gradients"], kinds["buffers"]) == (p, 0)
            else:
                assert (kinds["gradients"], kinds["buffers"]) == (gradients, p)


def test_zero_redundancy_holds_each_moment_once(ranks):
    """Whole tensors: together the ranks hold the moments of one, and nobody more than the largest tensor above half."""
    held = [h["at_rest"] for h in ranks(moments_held, configured("zero1", "torch"))]
    whole = 2 * num_bytes(WITH_GRADIENT) + STEP_BYTES * len(WITH_GRADIENT)
    assert sum(kinds["optimizer"] for kinds in held) == whole
    largest = max(2 * p.nbytes + STEP_BYTES for p in WITH_GRADIENT)
    assert max(kinds["optimizer"] for kinds in held) <= whole / 2 + largest
    assert all(kinds["buffers"] == num_bytes(TRAINED) for kinds in held)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_fsdp2_holds_shards(ranks, stage, world_size):
    """Rank 0's rows are the most: shards are padded to them in every rank's memory."""
    make = configured(stage, "torch")
    padded = sum(rows_bytes(shape, 0, world_size) for shape in SHAPES)
    for rank, held in enumerate(ranks(moments_held, make, world_size=world_size)):
        assert {kinds["parameters"] for kinds in held.values()} == {padded}
        mine = sum(rows_bytes(tuple(p.shape), rank, world_size) for p in WITH_GRADIENT)
        assert held["at_rest"]["optimizer"] == 2 * mine + STEP_BYTES * len(WITH_GRADIENT)
        assert held["at_rest"]["gradients"] == 0
        assert held["after_backward"]["buffers"] == held["at_rest"]["buffers"] == 0


def test_without_reshard_everything_is_gathered_between_forward_and_backward(ranks):
    """Padded: N times rank 0's rows. With reshard only the root's parameters (embedding, norm, the unused one)."""
    root = [
        tuple(p.shape) for name, p in MODULE.named_parameters() if not name.startswith("blocks")
    ]
    for stage, gathered in (("zero2", SHAPES), ("zero3", root)):
        for held in ranks(moments_held, configured(stage, "torch")):
            expected = sum(2 * rows_bytes(shape, 0, 2) for shape in gathered)
            assert held["after_forward"]["buffers"] == expected


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("ddp", "everything replicated"),
        ("zero1", "gradients replicated"),
        ("zero2", "parameters rest sharded"),
        ("zero3", "everything rests sharded"),
    ],
)
def test_settings_say_what_rests_where(ranks, stage, said):
    assert all(said in engine for engine in ranks(engine_of, configured(stage, "torch")))


@pytest.mark.parametrize(
    ("engine", "model"),
    [("ddp", "gpt2"), ("fsdp2_no_reshard", "mixtral"), ("fsdp2", "gpt2"), ("fsdp2", "llama")],
)
def test_models_of_transformers(ranks, engine, model):
    check(ranks, NATIVE[engine], Recipe(model=model))


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
@pytest.mark.parametrize("stage", HSDP)
def test_fsdp2_in_two_groups_equals_one_process(ranks, stage, precision):
    """Also its state: each element is given once, by one of the groups."""
    check(ranks, HSDP[stage], Recipe(world_size=4, precision=precision))


@pytest.mark.parametrize("model", ["moe_one_rank", "moe_by_turns"])
@pytest.mark.parametrize("stage", ["ddp", "zero1"])
def test_ddp_with_modules_skipped_on_some_ranks(ranks, stage, model):
    engine = NATIVE["ddp" if stage == "ddp" else "ddp_zero_redundancy"]
    check(ranks, engine, Recipe(model=model))


def test_a_failing_rank_of_ddp_is_told(ranks):
    """Parameters without gradient, where nobody said there may be some: torch's message, not a hang."""
    with pytest.raises(RankError, match="Expected to have finished reduction"):
        ranks(train_without_search)


def train_without_search(world: World) -> None:
    recipe = Recipe()
    module = MODELS["toy"].build().module
    config = recipe.optimizer_config()
    strategy = TorchDDP(
        module,
        param_groups=parameter_groups(module, config, []),
        optimizer_factory=optimizer_factory(config),
        world=world,
    )
    run_steps(strategy, world, recipe, range(2))
