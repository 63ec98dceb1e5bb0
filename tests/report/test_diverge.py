"""Hashes against the tensors themselves, and bugs put into one strategy: the first wrong verb and tensor is named."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests import rank_code
from tests.run_folders import write_run
from tests.test_rank import log_of, make_job, run
from zeroexp.commandline import first_difference as command
from zeroexp.config import keys as configs
from zeroexp.config.keys import ConfigError
from zeroexp.measure.hashes import Hash
from zeroexp.report.reading import read_runs
from zeroexp.report.step_differences import compare_hashes

BOUND = 1e-4


def hash_of(values: torch.Tensor, start: int = 0) -> Hash:
    made = Hash(0, "weights", "w")
    made.add(values, start)
    return made


@hypothesis.given(
    st.integers(1, 300),
    st.lists(st.integers(0, 300), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_hashes_of_pieces_add_up_to_that_of_the_whole(numel, cuts, dtype):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    borders = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    pieces = [hash_of(values[a:b], a) for a, b in pairwise(borders)]
    joined = pieces[-1]
    for piece in pieces[:-1]:
        joined.join(piece)
    whole = hash_of(values)
    assert (joined.exact, joined.numel) == (whole.exact, numel)
    assert joined.sketch == pytest.approx(whole.sketch)


def test_one_bit_and_an_exchange_change_the_hash_and_minus_zero_does_not():
    values = torch.randn(100)
    changed, exchanged = values.clone(), values.clone()
    changed[7] = torch.nextafter(changed[7], torch.tensor(10.0))
    exchanged[[3, 4]] = exchanged[[4, 3]]
    hashes = {hash_of(each).exact for each in (values, changed, exchanged)}
    assert len(hashes) == 3
    assert hash_of(torch.tensor([0.0, 1.0])).exact == hash_of(torch.tensor([-0.0, 1.0])).exact


def test_the_sketch_tells_rounding_from_an_error():
    values = torch.randn(10_000)
    rounded = values * (1 + 1e-7)
    wrong = values + 0.1 * torch.randn(10_000)
    assert hash_of(values).distance(hash_of(rounded)) < 1e-6
    assert 0.03 < hash_of(values).distance(hash_of(wrong)) < 0.3
    assert not hash_of(values).distance(hash_of(values * float("nan"))) <= BOUND


def trained(
    local, folder: Path, strategy: str, rows: str, bug: str = "", implementation: str = "buffer"
) -> Path:
    """Train in `folder` with hashes of steps 0 to 2; `rows` places parameters, gradients and optimizer."""
    job = make_job(
        folder,
        strategy__name=strategy,
        strategy__implementation=implementation,
        train__hash_steps=[0, 1, 2],
    )
    config = configs.load(folder / "config.yaml")
    words = {"R": "replicate", "P": "partial", "S": "shard"}
    state = (config.strategy.parameters, config.strategy.gradients, config.strategy.optimizer)
    for row, letter in zip(state, rows, strict=True):
        row.placement = words[letter]
    config.data.micro_batch_size = (
        2  # one microbatch: ZeRO-3 would add two after it has reduced each
    )
    configs.save(config, folder / "config.yaml")
    if bug:
        rank_code.choose(folder, f"tests.report.diverging_main:{bug}")
    assert run(local, job).status == "done", log_of(job, 0)
    return folder


@pytest.fixture(scope="module")
def plain(local, tmp_path_factory) -> Path:
    return trained(local, tmp_path_factory.mktemp("plain") / "ddp", "ddp", "RRR")


@pytest.mark.parametrize(("strategy", "rows"), [("zero1", "RPS"), ("zero3", "SSS")])
def test_strategies_without_a_bug_are_equal_in_every_bit(local, tmp_path, plain, strategy, rows):
    found = compare_hashes(plain, trained(local, tmp_path / "run", strategy, rows), BOUND)
    assert found.exactly is None
    assert (found.num_steps, found.num_tensors > 50) == (3, True)


@pytest.mark.parametrize(
    ("bug", "strategy", "rows", "told"),
    [
        (
            "wrong_gather",
            "zero3",
            "SSS",
            "step 1, gather: blocks.1.up.weight on rank 1, microbatch 0",
        ),
        ("wrong_reduce", "zero3", "SSS", "step 1, reduce: the gradient of "),
        ("wrong_reduce", "zero1", "RPS", "step 1, hand_over: the gradient of "),
        ("wrong_publish", "zero1", "RPS", "step 2, publish: blocks.0.up.weight on rank 0"),
    ],
)
def test_the_first_wrong_verb_and_tensor_is_named(
    local, tmp_path, plain, bug, strategy, rows, told
):
    found = compare_hashes(plain, trained(local, tmp_path / "run", strategy, rows, bug), BOUND)
    assert found.exactly is not None and str(found.exactly).startswith(told)
    assert found.beyond == found.exactly
    assert command.report_lines(found, BOUND)[1].startswith("first difference beyond 0.0001: step ")


def test_torch_rounds_otherwise_and_lies_within_the_bound(local, tmp_path, plain):
    other = trained(local, tmp_path / "run", "ddp", "RRR", implementation="torch")
    found = compare_hashes(plain, other, BOUND)
    assert found.beyond is None
    assert any(
        "nothing lies further apart" in line or "equal in every bit" in line
        for line in command.report_lines(found, BOUND)
    )


def test_what_runs_again_with_hashes_is_no_point_of_its_sweep(tmp_path, monkeypatch):
    run = write_run(tmp_path / "sweep/a")

    def rerun(run: Path, again: Path) -> None:
        shutil.copytree(run, again)
        (again / "hashes.0.jsonl").write_text(json.dumps(asdict(Hash(0, "weights", "w"))) + "\n")

    monkeypatch.setattr(command, "_rerun", rerun)
    assert compare_hashes(*(command._with_hashes(run) for _ in "AB"), BOUND).num_tensors == 1
    assert [found.name for found in read_runs([run.parent])[0]] == ["a"]


def test_runs_that_can_not_be_compared_are_refused_in_one_line(tmp_path, plain):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text((plain / "config.yaml").read_text())
    (other / "hashes.0.jsonl").write_text(json.dumps(asdict(Hash(9, "weights", "w"))) + "\n")
    with pytest.raises(ConfigError, match="no step was hashed in both"):
        compare_hashes(plain, other, BOUND)
    (other / "hashes.0.jsonl").write_text('{"step": 0, "ki')
    with pytest.raises(ConfigError, match="line 1 is torn"):
        compare_hashes(plain, other, BOUND)
