"""What may not vary between repeats, what else differs, times that cannot be, and what moved between two sweeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.composing import composed
from tests.report.made import change, edit, points, repeats
from tests.run_folders import write_run
from zeroexp.config.keys import ConfigError, save
from zeroexp.report import conclusions, moved_points
from zeroexp.report.conclusions import compare_points, conclude
from zeroexp.report.differences import differences, lines_of_broken_must_equal
from zeroexp.report.exports import as_json
from zeroexp.report.headline import headline_cards
from zeroexp.report.loss_agreement import losses_of
from zeroexp.report.measured_points import MeasuredPoint, points_of
from zeroexp.report.moved_points import lines_of_moved, points_that_moved
from zeroexp.report.page.losses import loss_chart
from zeroexp.report.reading import read_runs
from zeroexp.report.results_table import render
from zeroexp.report.statistics import why_doubtful


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two runs of one point, and one of another."""
    for name, strategy in [("a", "zero3"), ("b", "zero3"), ("c", "ddp")]:
        write_run(tmp_path / name, strategy)
    return tmp_path


def test_numbers_that_vary_between_repeats_break_a_claim(sweep: Path) -> None:
    found = conclude(points(sweep))
    assert (found.broken, found.doubts) == ([], [])
    held = json.loads((sweep / "b/summary.json").read_text())["memory"]["by_kind"]["gradients"]
    first, second = held["per_rank"]
    odd = {"memory.by_kind.gradients.per_rank": [first, second + 4]}
    change(sweep / "b/summary.json", odd)
    (line,) = conclude(points(sweep)).broken
    assert line.startswith("a: gradients bytes: [") and line.endswith(" (a, b)")


def test_traffic_of_a_repeat_that_was_resumed_is_of_fewer_steps(sweep: Path) -> None:
    """An outer step is in some of the steps, so that means over other numbers of steps differ."""
    sent = json.loads((sweep / "b/summary.json").read_text())["sent_bytes_by_kind"]
    other = {"sent_bytes_by_kind": {kind: number + 0.5 for kind, number in sent.items()}}
    change(sweep / "b/summary.json", other)
    assert len(conclude(points(sweep)).broken) == len(sent)
    change(sweep / "b/summary.json", {"num_steps": 3})
    assert conclude(points(sweep)).broken == []


def test_a_last_bit_of_a_loss_that_varies_breaks_a_claim_where_sums_have_one_order(sweep):
    edit(sweep / "b/records.jsonl", '"loss": 7.0,', '"loss": 7.000000000000001,')
    (line,) = conclude(points(sweep)).broken
    assert line == "a: losses part at step 0: 7.0 and 7.000000000000001 (a, b)"
    for run in ("a", "b"):
        (sweep / run / "engine.json").write_text('{"transport": "nccl"}')
    assert conclude(points(sweep)).broken == []


def test_what_differs_beside_the_strategy_is_listed(sweep: Path) -> None:
    assert differences(points(sweep)) == {}
    edit(sweep / "c/config.yaml", "max_grad_norm: 1.0", "max_grad_norm: null")
    edit(sweep / "c/environment.json", '"torch": "2.13.0"', '"torch": "2.12.1"')
    for run, cores in {"a": 0.01, "b": 0.02, "c": 1.31}.items():
        change(sweep / run / "environment.json", {"other_cores": cores})
    assert differences(points(sweep)) == {
        "optimizer.max_grad_norm": {"1.0": ["a"], "its own default": ["c"]},
        "versions.torch": {"2.13.0": ["a"], "2.12.1": ["c"]},
        "load": {"none by others": ["a"], "1.3 cores used by others": ["c"]},
    }


def test_what_a_study_wants_equal_is_a_claim(sweep: Path) -> None:
    edit(sweep / "c/config.yaml", "fused: true", "fused: false")
    (sweep / "c/engine.json").write_text('{"transport": "gloo"}')
    assert lines_of_broken_must_equal(points(sweep), ["data", "precision", "fused"]) == []
    (line,) = lines_of_broken_must_equal(points(sweep), ["optimizer"])
    assert line == "optimizer.fused differs: true, but false in c"
    assert len(lines_of_broken_must_equal(points(sweep), ["optimizer.fused", "transport"])) == 2
    for run in "abc":
        edit(sweep / run / "config.yaml", "must_equal: []", "must_equal: [optimizer]")
    assert conclude(points(sweep)).broken == [f"study.must_equal: {line}"]


def test_a_time_that_others_spoilt_or_that_nobody_knows_is_in_doubt(tmp_path: Path) -> None:
    repeats(tmp_path, {"ddp": [1.0, 1.01, 1.02], "zero3": [1.0, 1.05, 1.1]})
    loads = {"ddp": 0.19, "ddp-1": 0.21}  # of two cores
    for run, cores in loads.items():
        change(tmp_path / run / "environment.json", {"other_cores": cores})
    made = points(tmp_path)
    assert list(map(why_doubtful, made)) == [
        "others used 0.2 of 2 cores",
        "its 95 % interval is 27 % wide",
    ]
    (doubt,) = conclude(made).doubts
    assert doubt == (
        "In doubt, and marked with ?, are the times of ddp (others used 0.2 of 2 cores), zero3 "
        "(its 95 % interval is 27 % wide): run them again by themselves."
    )
    assert " 1,010.0 ?  " in render(made)
    (card,) = [card for card in headline_cards(made) if card.label == "shortest step"]
    assert card.detail.endswith("in doubt: others used 0.2 of 2 cores")
    change(tmp_path / "ddp-1/environment.json", {"other_cores": 0.0})
    assert why_doubtful(points(tmp_path)[0]) is None


def test_the_reference_is_chosen_by_name(sweep: Path) -> None:
    assert conclude(points(sweep), "c").reference == "c"


@pytest.mark.parametrize("metric", ["final_loss", "validation_accuracy"])
def test_what_points_reach_is_compared_seed_by_seed(tmp_path: Path, metric: str) -> None:
    """The loss differs by seed far more than by strategy: 1 % of it for zero2, nothing for zero3."""
    for seed, reached in enumerate((2.0, 3.0, 4.0, 2.5)):
        for strategy, more in (("ddp", 0.0), ("zero2", 0.03), ("zero3", 0.001 * (-1) ** seed)):
            folder = write_run(tmp_path / f"{strategy}-seed{seed}", strategy)
            edit(folder / "config.yaml", "seed: 0", f"seed: {seed}")
            change(folder / "summary.json", {metric: reached + more})
    found = conclude(points(tmp_path))
    assert found.broken == [], "other seeds have other losses"
    # Deviation of 2, 3, 4, 2.5: 0.8539. Student: 4.177 (Bonferroni of two) × 0.001155 / √4 over a mean of 2.875.
    head, ddp, zero2, zero3 = found.verdicts[-4:]
    assert head.startswith("Loss of the last step" if metric == "final_loss" else "Accuracy on")
    assert ddp == "  ddp    2.8750 ± 0.8539 (4 seeds)"
    assert zero2 == "  zero2  2.9050 ± 0.8539 (4 seeds): higher by 1 % at least"
    assert zero3 == "  zero3  2.8750 ± 0.8541 (4 seeds): equal within 0.084 %"
    change(tmp_path / "zero3-seed1/summary.json", {"diverged_at": 5})
    assert conclude(points(tmp_path)).verdicts[-1] == "  zero3  nan (4 seeds): diverged"


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    """Sweeps `one` (seed 0 of zero3 failed), `other` (seed 1) and `third` (seed 2); each seed has losses of its own."""
    for sweep, strategy, seed in (
        *[("one", strategy, seed) for strategy in ("ddp", "zero3") for seed in (0, 1)],
        ("other", "ddp", 1),
        ("third", "ddp", 2),
    ):
        status = "failed" if (strategy, seed) == ("zero3", 0) else "done"
        run = write_run(tmp_path / sweep / f"{strategy}-seed{seed}", strategy, status=status)
        edit(run / "config.yaml", "seed: 0", f"seed: {seed}")
        edit(run / "records.jsonl", '"loss": 7.0,', f'"loss": {7.0 + seed},')
    return tmp_path


def test_losses_are_compared_of_a_seed_that_points_share(seeds: Path) -> None:
    verdict = losses_of(points(seeds / "one"))
    assert verdict and {c.point: c.difference for c in verdict.curves} == {"ddp": 0, "zero3": 0}
    apart = [*points(seeds / "one"), *points(seeds / "third")]
    verdict = losses_of(apart)
    assert verdict and [curve.point for curve in verdict.curves] == ["ddp", "zero3"]
    assert loss_chart(apart).caption.endswith(" Of another seed, and left out: ddp-seed2.")


# ---- two sweeps


@pytest.fixture
def sweeps(tmp_path: Path) -> Path:
    """Three repeats of ddp and zero3 in each; `after` has zero2 too, and zero3 takes three quarters of the time."""
    seconds = [1.0, 1.001, 1.002]
    repeats(tmp_path / "before", {"ddp": seconds, "zero3": seconds})
    repeats(tmp_path / "after", {"ddp": seconds, "zero3": [0.75 * each for each in seconds]})
    write_run(tmp_path / "after/zero2", "zero2")
    return tmp_path


def test_who_got_faster_is_said_and_who_did_not(sweeps: Path) -> None:
    pairs, alone = points_that_moved(points(sweeps / "before"), points(sweeps / "after"))
    assert {one.name: one.has_moved for one in pairs} == {"ddp": False, "zero3": True}
    assert alone == ["  only after: zero2"]
    head, first, *_ = lines_of_moved(pairs, alone)
    assert head == "1 of 2 points moved (after over before):"
    assert first == "  zero3: step 0.75 [0.75, 0.75]: faster"


def test_a_point_of_torch_that_failed_hides_no_time(sweeps: Path) -> None:
    """It has no time, over which others could be taken; that it failed is what moved."""
    write_run(sweeps / "before/torch", "ddp", "torch", status="failed", reason="rank 0 died")
    write_run(sweeps / "after/torch", "ddp", "torch")
    pairs, _ = points_that_moved(points(sweeps / "before"), points(sweeps / "after"))
    changes = {one.name: (one.comparison is not None, one.changes) for one in pairs}
    assert changes["zero3"] == changes["ddp"] == (True, [])
    assert changes["torch"] == (False, ["did not come to its end before"])


def test_no_point_is_compared_with_one_of_another_sweep(sweeps: Path) -> None:
    """What the machine did between them would be a verdict: all of `after` took twice the time."""
    for run in (sweeps / "after").glob("*"):
        seconds = json.loads((run / "summary.json").read_text())["step_seconds_median"]
        change(run / "summary.json", {"step_seconds_median": 2 * seconds})
    both = points_of([x for name in ("before", "after") for x in read_runs(sweeps / name)[0]])
    found = conclude(both)
    told = {name: (one.ratio, one.verdict) for name, one in found.comparisons.items()}
    assert told["before/zero3"] == (1, "no difference within ±2 %")
    assert told["after/zero3"] == (pytest.approx(0.75), "faster")
    assert {*told} == {"before/zero3", "after/zero3", "after/zero2"}
    assert found.reference == "before/ddp or after/ddp"
    assert conclude(both, "zero3").comparisons.keys() == {"before/ddp", "after/ddp", "after/zero2"}
    with pytest.raises(ConfigError, match="--reference zero2: no such point with a time"):
        conclude(both, "zero2")


def test_points_that_differ_in_what_they_save_are_each_beside_themselves(tmp_path: Path) -> None:
    for sweep, values in (("before", ("null", "1")), ("after", ("1", "null"))):
        for value in values:
            folder = write_run(tmp_path / sweep / f"zero3-{value}")
            save(composed(f"checkpoint.every={value}"), folder / "config.yaml")
    change(tmp_path / "after/zero3-1/summary.json", {"num_parameters": 1})
    pairs, alone = points_that_moved(points(tmp_path / "before"), points(tmp_path / "after"))
    assert {one.name: one.has_moved for one in pairs} == {"zero3-1": True, "zero3-null": False}
    assert alone == []


def test_a_unit_of_null_is_a_block(tmp_path: Path) -> None:
    """Of torch's engines the config that ran keeps null; for ours block stands there."""
    torch = "strategy.implementation=torch"
    for sweep, unit in (("before", "null"), ("after", "block"), ("others", "layer")):
        folder = write_run(tmp_path / sweep / "zero3", "zero3", "torch")
        save(composed("strategy=zero3", torch, f"strategy.unit={unit}"), folder / "config.yaml")
    before, after, others = (points(tmp_path / sweep) for sweep in ("before", "after", "others"))
    assert len(points_that_moved(before, after)[0]) == 1
    assert not points_that_moved(before, others)[0]


def test_each_of_two_sweeps_claims_by_itself(tmp_path: Path) -> None:
    for sweep, bound, wrong in (("before", "1e-5", "zero3"), ("after", "10", "ddp")):
        for strategy in ("ddp", "zero3"):
            folder = write_run(tmp_path / sweep / strategy, strategy)
            config = composed(f"strategy={strategy}", f"study.loss_agreement={bound}")
            save(config, folder / "config.yaml")
            if strategy == wrong:
                edit(folder / "records.jsonl", '"loss": ', '"loss": 1')
    both = [*read_runs(tmp_path / "before")[0], *read_runs(tmp_path / "after")[0]]
    found = conclude(points_of(both))
    (line,) = found.broken
    assert line.startswith("before: 2 loss curves DISAGREE")
    head, line = found.claim_lines
    assert head == "after:" and line.startswith("  2 loss curves agree")
    told = json.loads(as_json(points_of(both), [], found))
    claims = [(claim["sweep"], claim["holds"]) for claim in told["claims"]]
    assert claims == [("before", False), ("after", True)]
    assert {curve["point"]: curve["agrees"] for curve in told["losses"]["curves"]} == {
        "before/ddp": True,
        "before/zero3": False,
        "after/ddp": True,
        "after/zero3": True,
    }
    assert "losses" not in {card.label for card in headline_cards(points_of(both))}


def test_sweeps_that_ask_for_one_bound_are_all_beside_the_first(tmp_path: Path) -> None:
    """A sweep whose points are alike may train another model than the one before, which is what a search asks."""
    for sweep, strategies in (("oracle", ["ddp"]), ("pair", ["zero2", "zero3"])):
        for strategy in strategies:
            folder = write_run(tmp_path / sweep / strategy, strategy)
            save(
                composed(f"strategy={strategy}", "study.loss_agreement=1e-5"),
                folder / "config.yaml",
            )
            if sweep == "pair":
                edit(folder / "records.jsonl", '"loss": ', '"loss": 1')
    both = [*read_runs(tmp_path / "oracle")[0], *read_runs(tmp_path / "pair")[0]]
    told = json.loads(as_json(points_of(both), [], conclude(points_of(both))))["losses"]["curves"]
    assert [curve["agrees"] for curve in told] == [True, False, False]
    # A third one that asks for another bound: each is beside its own first, also of the two that ask for one.
    folder = write_run(tmp_path / "wide/ddp", "ddp")
    save(composed("strategy=ddp", "study.loss_agreement=10"), folder / "config.yaml")
    three = [*both, *read_runs(tmp_path / "wide")[0]]
    told = json.loads(as_json(points_of(three), [], conclude(points_of(three))))["losses"]["curves"]
    assert [curve["agrees"] for curve in told] == [True] * 4


def test_a_point_that_trained_fewer_steps_has_moved(sweeps: Path) -> None:
    records = sweeps / "after/zero3/records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[:-1]))
    pairs, _ = points_that_moved(points(sweeps / "before"), points(sweeps / "after"))
    last = json.loads(lines[-1])["step"]
    (changes,) = (one.changes for one in pairs if one.name == "zero3")
    assert f"steps: {last + 1} and {last}" in changes


def test_times_of_many_points_are_compared_as_many(sweeps, monkeypatch):
    """Else one of twenty points is faster by chance."""
    asked: list[int] = []

    def compared(*seconds: Any, num_comparisons: int = 1) -> None:
        asked.append(num_comparisons)

    for module in (conclusions, moved_points):
        monkeypatch.setattr(module, "compare_step_times", compared)
    points_that_moved(points(sweeps / "before"), points(sweeps / "after"))
    assert asked == [2, 2]
    asked.clear()
    compare_points(points(sweeps / "after"))
    assert asked == [2, 2]


def test_keys_that_came_later_part_no_points(sweeps: Path) -> None:
    """A run from before a key was added has its default; of other settings those that differ are told."""
    for config in (sweeps / "before").glob("*/config.yaml"):
        edit(config, "  offload_fraction: null\n", "")
        edit(config, "  min_lr_ratio: 0.1\n", "")
        edit(config, "  timeout_s: 3600", "  timeout_s: 60")  # another night, another partition
        edit(config, "  partition: null", "  partition: long")
    for config in (sweeps / "before").glob("ddp*/config.yaml"):
        edit(config, "  steps: ", "  a_key_that_went: null\n  steps: 1")
    pairs, alone = points_that_moved(points(sweeps / "before"), points(sweeps / "after"))
    assert [one.name for one in pairs] == ["zero3"]
    told, only = alone
    assert told.startswith("  no pair: ddp has train.steps=1") and told.endswith(" after")
    assert only == "  only after: zero2"


def test_what_the_machine_did_between_two_sweeps_moves_nothing(tmp_path: Path) -> None:
    """It was 30 % slower afterwards, and most in the second round: PyTorch's own point shows it."""
    slower = (1.3, 1.5, 1.3)
    for sweep, factors in (("before", (1.0, 1.0, 1.0)), ("after", slower)):
        repeats(tmp_path / sweep, {"ddp": [*factors], "zero3": [0.8 * each for each in factors]})
        for run in (tmp_path / sweep).glob("ddp*"):
            edit(run / "config.yaml", "implementation: buffer", "implementation: torch")
    pairs, _ = points_that_moved(points(tmp_path / "before"), points(tmp_path / "after"))
    ratios = {one.name: one.comparison and one.comparison.ratio for one in pairs}
    assert ratios == {"ddp": pytest.approx(1.364, abs=1e-3), "zero3": pytest.approx(1)}


def test_a_peak_moves_a_point_and_what_a_thread_frees_late_does_not(sweeps: Path) -> None:
    file = sweeps / "after/ddp/summary.json"
    peak = json.loads(file.read_text())["memory"]["peak"]["fullest"]
    for more, words in ((1.0009, []), (2.0, [f"peak bytes: {peak:.0f} and {2 * peak:.0f}"])):
        change(file, {"memory.peak.fullest": more * peak})
        pairs, _ = points_that_moved(points(sweeps / "before"), points(sweeps / "after"))
        (ddp,) = [one for one in pairs if one.name == "ddp"]
        assert ddp.changes == words


def test_another_seed_moves_no_point(seeds: Path) -> None:
    one, other, third = (points(seeds / sweep) for sweep in ("one", "other", "third"))
    for before, after in ((one, other), (other, one), (one, third)):
        ((ddp,), _) = points_that_moved(before, after)
        assert ddp.changes == []
    edit(seeds / "other/ddp-seed1/records.jsonl", '"loss": 8.0,', '"loss": 8.5,')
    ((ddp,), _) = points_that_moved(one, points(seeds / "other"))
    assert ddp.changes == ["losses part at step 0: 8.0 and 8.5"]


def test_a_run_that_went_on_from_another_is_compared_by_step(sweeps: Path) -> None:
    records = sweeps / "after/ddp/records.jsonl"
    lines = records.read_text(encoding="utf-8").splitlines(keepends=True)
    records.write_text("".join(lines[10:]), encoding="utf-8")
    before, after = points(sweeps / "before"), points(sweeps / "after")
    (ddp,) = [one for one in points_that_moved(before, after)[0] if one.name == "ddp"]
    assert ddp.changes == [] and not conclude(after).broken
    assert [trace["x"][0] for trace in loss_chart(after[:1]).data] == [10]


def test_a_study_speaks_of_its_own_sweep(sweeps: Path) -> None:
    """What it wants equal is another in each sweep, after any change."""
    for file in sweeps.glob("*/*/config.yaml"):
        edit(file, "must_equal: []", "must_equal: [git]")
    for file in (sweeps / "after").glob("*/environment.json"):
        change(file, {"git.commit": "4567def"})

    def both() -> list[MeasuredPoint]:
        return points_of([x for name in ("before", "after") for x in read_runs(sweeps / name)[0]])

    assert conclude(both()).broken == []
    change(sweeps / "after/zero2/environment.json", {"git.commit": "89ab012"})
    (line,) = conclude(both()).broken
    assert "git.commit differs: 4567def, but 89ab012 in after/zero2" in line


def test_a_byte_and_a_bit_of_a_loss_move_a_point(sweeps: Path) -> None:
    change(sweeps / "after/ddp/summary.json", {"calls_by_kind.gather": 9.0})
    edit(sweeps / "after/ddp/records.jsonl", '"loss": 7.0,', '"loss": 7.000000000000001,')
    pairs, _ = points_that_moved(points(sweeps / "before"), points(sweeps / "after"))
    (ddp,) = [one for one in pairs if one.name == "ddp"]
    assert ddp.has_moved
    assert [*ddp.changes] == [
        "gather calls: 8.0 and 9.0",
        "losses part at step 0: 7.0 and 7.000000000000001",
    ]
