"""The benchmark on a model of a millisecond: it measures what it says, and fails when a number got worse.

What measures runs in `make test-all`, where no other test takes its cores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import (
    accuracy,
    breakdown,
    check,
    checkpoints,
    muon_peers,
    run,
    table,
    tunable,
    tuned,
)
from benchmarks.engines import ENGINES, ON_REQUEST, engines_for, model_config, parameter_bytes
from benchmarks.links import open_link, payload_bytes_per_second, why_not_shaped
from benchmarks.published_run import HeldByTwoRanks
from benchmarks.ranks import Ranks, Spec, Training
from tests.run_folders import record
from tests.test_docs import prose
from zeroexp.measure.summary import summarise, summarise_rank
from zeroexp.measure.tcp_bytes import wire_meter
from zeroexp.models.module import build_model
from zeroexp.report.markdown import BEGIN, END, LINE

ROOT = Path(__file__).resolve().parent.parent
ENGINES_TRIED = (
    *("limit_copies", "limit_copies3"),
    *("zero1_buffer", "zero2_buffer_sockets", "zero3_buffer_sockets", "fsdp2"),
)


COMPARISON = run.Comparison("t", "tiny", num_steps=2, num_rounds=2, engines=ENGINES_TRIED)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Ranks]]:
    """Started once, with their ranks: what all tests of this file measure, and then let die."""
    (group,) = run._groups(COMPARISON)
    with open_link("loopback") as link, run.running(COMPARISON, group, link) as engines:
        yield engines


@pytest.fixture(scope="module")
def rows(engines) -> list[dict]:
    return run.rows_of(COMPARISON, engines, None)


@pytest.mark.slow
def test_bytes_on_the_wire_are_what_theory_says(rows):
    """Two ranks: DDP and ZeRO-2 send each parameter once (2 P (N-1)/N = P); barriers and counts are the slack."""
    sent = {row["engine"]: row["wire_bytes"] for row in rows}
    whole = parameter_bytes("tiny", "fp32")
    assert all(sent[limit] < 0.01 * whole for limit in ("limit", "limit_copies", "limit_copies3"))
    assert sent["ddp"] == pytest.approx(whole, rel=0.03)
    assert sent["zero2_buffer_sockets"] == pytest.approx(whole, rel=0.03)
    # gloo's reduce-scatter is an all-reduce inside: P instead of P/2, beside one all-gather or two of P/2 each.
    assert 1.5 * whole < sent["fsdp2"] < 2.05 * whole
    for row in rows:
        if row["engine"].endswith("_sockets"):
            assert row["wire_bytes"] == pytest.approx(row["form_bytes"], rel=0.03), row["engine"]


@pytest.mark.slow
def test_table_shows_every_engine_between_its_markers(rows, tmp_path):
    page = tmp_path / "measured.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    table.replace_in(page, table.markdown(rows))
    assert [line[:2] for line in table.cells(rows)[1:]] == [["t", r["engine"]] for r in rows]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert all(f"\n{row['engine']} | " in text for row in rows)
    assert [line for _, line in prose(text) if len(line) > LINE] == []


def test_page_without_markers_is_refused(tmp_path):
    page = tmp_path / "measured.md"
    page.write_text("no place for numbers")
    with pytest.raises(SystemExit, match="measured: begin"):
        table.replace_in(page, "numbers")


def checked(**changes) -> dict:
    """A row of one of our engines, measured on a quiet machine."""
    row = {"comparison": "t", "engine": "zero3_buffer_sockets", "other_cores": 0.0}
    times = {"ratio_to_limit": 1.2, "step_seconds": 1.0, "step_seconds_quartiles": [0.95, 1.1]}
    return {**row, **times, "peak_bytes": 9_000_000, "wire_bytes": 4_000_000, **changes}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, ""),
        ({"peak_bytes": 9_000_000 + check.NOISE_BYTES}, ""),
        (
            {"peak_bytes": 9_065_537},
            "peak_bytes 9,065,537 is 65,537 more than the stored 9,000,000",
        ),
        ({"peak_bytes": 5_000_000, "wire_bytes": 4_200_000}, "wire_bytes 4,200,000"),
        ({"ratio_to_limit": 1.4}, ""),  # its faster turns are no slower than what is stored
        ({"ratio_to_limit": 1.5}, "1.50 of the limit, 1.42 in its faster quarter"),
        ({"ratio_to_limit": 1.5, "other_cores": 1.0}, ""),
        ({"engine": "fsdp2", "peak_bytes": 99_000_000}, ""),
        ({"peak_bytes": None}, ""),
    ],
)
def test_check_finds_what_got_worse_and_nothing_else(changes, found):
    stored = check.numbers_of([checked()])
    rows = [checked(**changes)]
    problems = [*check.more_bytes(rows, stored), *check.slower(rows, stored)]
    assert len(problems) == bool(found) and found in "".join(problems)


def test_check_says_which_times_it_does_not_judge():
    stored = check.numbers_of([checked()])
    assert check.why_not_timed([checked()], stored) == []
    assert "other programs" in check.why_not_timed([checked(other_cores=1.0)], stored)[0]
    stored["t/zero3_buffer_sockets"]["processor"] = "another"
    assert "another processor" in check.why_not_timed([checked()], stored)[0]
    assert check.slower([checked(ratio_to_limit=9.0)], stored) == []
    kept = check.numbers_of([checked(other_cores=1.0, wire_bytes=900)])
    assert kept == {"t/zero3_buffer_sockets": {"peak_bytes": 9_000_000}}, "handshakes, and no time"


@pytest.mark.slow
def test_engines_that_die_are_left_out_and_the_others_go_on(rows, engines, monkeypatch):
    """Either rank, between two turns or with an order that it never reads."""
    assert len(rows) == len(engines), "measured before they die"
    between, ordered = ENGINES_TRIED[:2], ENGINES_TRIED[2:]

    def kill(process) -> None:
        process.kill()
        process.join()

    for rank, name in enumerate(between):
        kill(engines[name]._processes[rank])
    for index, name in enumerate(ordered):
        victim, read_answers = engines[name]._processes[index % 2], engines[name]._answers
        os.kill(victim.pid, signal.SIGSTOP)

        def answers(seconds: float, victim=victim, read_answers=read_answers) -> list:
            kill(victim)
            return read_answers(seconds)

        monkeypatch.setattr(engines[name], "_answers", answers)
    left = run.rows_of(COMPARISON, engines, None)
    assert [(row["engine"], row["num_turns"]) for row in left] == [("limit", 2), ("ddp", 2)]


def test_engines_that_need_much_memory_share_it_in_groups(monkeypatch):
    monkeypatch.setattr(run, "available_bytes", lambda: 16 << 30)
    comparison = run.Comparison("t", "smollm2_135m", engines=tuple(ENGINES))
    groups = run._groups(comparison)
    assert len(groups) > 1
    assert all(group[:2] == ["limit", "ddp"] for group in groups)
    measured = {engine for group in groups for engine in group}
    assert measured == set(engines_for(world_size=2))


def test_what_runs_on_request_is_in_no_comparison_of_all_engines():
    groups = run._groups(run.Comparison("t", "tiny"))
    measured = {engine for group in groups for engine in group}
    assert measured == set(engines_for(world_size=2)) - set(ON_REQUEST)
    asked = {e: {c.name for c in run.COMPARISONS if e in c.engines} for e in ON_REQUEST}
    assert asked["zero3_buffer_keep_all"] == {"small_1gbit", "small_200mbit"}


# -- checkpoints ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def costs(tmp_path_factory) -> list[dict]:
    """Each way saves and loads, twice; a rank raises where what it loaded is not what it saved, bit for bit."""
    folder = tmp_path_factory.mktemp("checkpoints")
    rows = checkpoints.compare(checkpoints.Comparison("t", "million", num_rounds=1), folder)
    assert list(folder.iterdir()) == [], "what was measured is removed"
    return rows


@pytest.mark.slow
def test_every_way_saves_the_same_bytes(costs):
    ways = [(engine, way) for engine, ways in checkpoints.WAYS.items() for way in ways]
    operations = ("blocked", "save", "load")
    told = [(row["engine"], row["saved_by"], row["operation"]) for row in costs]
    assert told == [(*way, operation) for way in ways for operation in operations]
    module = build_model(model_config("million"), seed=0, device="meta").module
    steps = 4 * len([*module.parameters()])  # a number each, beside weight and two moments
    state = 3 * parameter_bytes("million", "fp32") + steps
    for row in costs:
        assert row["bytes"] == state
        assert row["mb_per_second"] == pytest.approx(state / 1e6 / row["seconds"])
        assert state < row["written_bytes"] < 1.2 * state, "once, with what says what it is"


@pytest.mark.slow
def test_a_save_costs_a_copy_of_a_share_or_of_all(costs):
    """A share that is written beside training, or the whole on rank 0; and a tensor of a tenth on its way there."""
    extra = {(r["engine"], r["saved_by"]): r for r in costs if r["operation"] == "save"}
    for (_, way), row in extra.items():
        copied = {"torch.save": 1.0, "DCP": 0.0}.get(way, 0.5) * row["bytes"]
        assert copied <= row["peak_extra_bytes"] < copied + 0.2 * row["bytes"], way


@pytest.mark.slow
def test_a_slow_link_takes_the_time_its_bytes_need():
    if reason := why_not_shaped():
        pytest.skip(reason)
    comparison = run.Comparison("t", "tiny", link="200mbit", num_steps=5, num_rounds=1)
    rows = run.compare(run.replace(comparison, engines=("zero2_buffer",)))
    (ours,) = [row for row in rows if row["engine"] == "zero2_buffer"]
    rate = payload_bytes_per_second("200mbit")
    assert rate is not None
    # The bucket lets its first 256 kB through at once, in each of the five steps of 0.9 MB.
    assert ours["step_seconds"] > 0.6 * ours["wire_bytes"] / rate


@pytest.mark.slow
def test_gpu_benchmark_runs_its_code_on_a_cpu(tmp_path):
    line = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--model", "tiny"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([*line, "--steps", "2"], cwd=tmp_path, env=env, check=True, timeout=600)
    rows = json.loads((tmp_path / "outputs" / "bench" / "gpu.json").read_text())
    assert {row["world_size"] for row in rows} == {1, 8, 64} and len(rows) == 10
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert 0 < row["host_share"] <= 1


@pytest.mark.slow
def test_accuracy_compares_a_real_run_number_by_number():
    (compared,) = accuracy.compare_bytes([("mlp_tiny", "zero3", "buffer", "fp32")])
    assert compared.num_rehearsed > 20 and compared.num_measured == 9
    assert compared.differ == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "row"),
    [
        ("7M, 4 x 64", ("zero3", "buffer")),
        # The rank whose closed form is the largest is not the fullest.
        ("14M, 1 x 64", ("zero3", "parameter")),
    ],
)
def test_accuracy_compares_a_real_peak(shape, row):
    """What is left is the step's data, which is in no plan."""
    (peak,) = accuracy.measure_peaks([(shape, row)])
    assert 0 <= peak.error < 64 << 10 < peak.planned.num_bytes


def test_what_two_ranks_held_is_known_from_the_fullest_and_the_mean():
    held = [{"after_backward": {"parameters": 7, "gradients": g}} for g in (2, 5)]
    ranks = [summarise_rank(r, [record(3, memory_bytes=held[r])]) for r in (0, 1)]
    found = HeldByTwoRanks(summarise([record(3)], ranks).memory)
    told = [found.held_bytes("after_backward", rank) for rank in range(found.world_size)]
    assert told == [held[1]["after_backward"], held[0]["after_backward"]]


def stepped(world, engine: str) -> tuple[list[float], int]:
    """Norms of two steps, and what a rank has sent in the second."""
    training = Training(Spec(engine, "tiny", "fp32", world.size), world)
    norms: list[float] = []
    for _ in range(2):
        meter = wire_meter(world.backend)
        norms.append(float(training.step(drain=True)))
    return norms, meter.take_bytes() or 0


@pytest.mark.parametrize("peer", ["ddp", "fsdp2"])
def test_a_peer_trains_alike_with_all_carriers_and_shared_memory_sends_nothing(ranks, peer):
    """Settings that change numbers would compare something else."""
    first = {each["carrier"]: name for name, each in tunable.variants(peer).items()}
    found = {carrier: ranks(stepped, name)[0] for carrier, name in first.items()}
    assert all(norms == pytest.approx(found["gloo"][0], rel=1e-6) for norms, _ in found.values())
    assert found["shared"][1] < 0.1 * found["gloo"][1]
    if "exact" in found:  # gloo's reduce-scatter sends twice the bytes
        assert found["exact"][1] < 0.85 * found["gloo"][1]


def test_no_peer_gets_more_settings_than_are_allowed():
    for peer in tunable.SETTINGS:
        names = tunable.variants(peer)
        assert 1 < len(names) <= tunable.MOST and set(names) <= ENGINES.keys()
        assert set(names) <= set(ON_REQUEST)


@pytest.mark.slow
def test_muon_of_peers_and_ours_is_that_of_one_process():
    """FSDP2's step is rounded once more, and what differs by a bit differs in the third digit of bfloat16."""
    expected = muon_peers.one_process("million", 2)
    bounds = {"fsdp2_gather": 1e-3, "layerwise": 0.0, "zero3 buffer, alltoall": 0.0}
    apart, sent = {}, {}
    for way in bounds:
        apart[way], sent[way], _ = muon_peers.measure(way, "million", 2, expected)
    assert all(apart[way] <= bound for way, bound in bounds.items()), apart
    assert sent["zero3 buffer, alltoall"] < min(sent["fsdp2_gather"], sent["layerwise"])


def test_each_part_of_the_breakdown_is_a_function_that_is_there():
    for places in breakdown.PARTS.values():
        for owner, name in places:
            assert callable(getattr(owner, name))


def test_beside_ours_over_sockets_a_peer_has_its_best_settings_over_sockets():
    ranked = ["ddp@bucket_cap_mb=5,carrier=shared", "ddp@bucket_cap_mb=25,carrier=gloo"]
    assert [tuned.fair(ours, ranked) for ours in ("zero1_buffer", "zero1_buffer_sockets")] == ranked
