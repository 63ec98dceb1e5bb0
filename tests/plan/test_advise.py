"""`--advise`: the fastest that fits of all that do the same work, in one line."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, replace

import pytest

from benchmarks import advised
from tests.composing import composed
from zeroexp.__main__ import INTERRUPTED
from zeroexp.config import plugins
from zeroexp.config.keys import Config, ConfigError
from zeroexp.plan import __main__ as plan
from zeroexp.plan import advise as advise_module
from zeroexp.plan import plan_points
from zeroexp.plan import rehearse as rehearse_module
from zeroexp.plan.advice_text import advice_json, as_text
from zeroexp.plan.advise import Advice, advise
from zeroexp.plan.changes import MICRO, SEQ_LEN, with_settings
from zeroexp.plan.composed_points import BATCH, ComposedPoints
from zeroexp.plan.outcome import PlannedPoint, RankPeak, RehearsedPeaks, plan_point
from zeroexp.plan.plan_points import Plans
from zeroexp.process import signals

GIB = 2**30
WORDS = ("model=mlp_tiny", "data=vectors", "data.seq_len=16", "world_size=2")
TINY = (*WORDS, "cluster.device=cuda", "data.global_batch_size=4")
LINE = " ".join(TINY)


def candidate(
    stage: str, micro: int, seconds: float | None, gib: float, kind: str = "parameters"
) -> PlannedPoint:
    """One of 8 GiB of memory, full of one kind; `seconds` None: it was not rehearsed."""
    config = with_settings(composed(*TINY), {"strategy": stage, MICRO: micro, BATCH: 8})
    planned = plan_point(config, None, "cuda")
    peak = RankPeak(0, "backward", int(gib * GIB), {kind: int(gib * GIB)}, {}, [])
    times = None if seconds is None else (0.8 * seconds, seconds, 1.2 * seconds)
    rehearsed = times and RehearsedPeaks([peak], "cpu", times, seconds or 0.0, "made up", "")
    outcome = replace(planned.outcome, memory_gib=8.0, rehearsed=rehearsed)
    return planned._replace(outcome=outcome)


def advice(*candidates: PlannedPoint) -> Advice:
    return Advice(candidates[0].config, [*candidates])


def test_the_fastest_that_fits_is_named_beside_the_one_that_leaves_most_memory():
    found = advice(
        candidate("ddp", 4, 1.0, 9),  # the fastest does not fit
        candidate("zero1", 2, 2.0, 6.5),
        candidate("zero1", 1, 2.5, 5),
        candidate("zero2", 1, 3.0, 5),  # as lean as another, and slower
        candidate("zero3", 2, 4.0, 2),
        candidate("zero3", 1, 5.0, 1),
        candidate("zero2", 2, None, 0),
    )
    best, leanest = found.best, found.leanest
    assert best and leanest
    assert (best.outcome.strategy, best.micro, best.seconds) == ("zero1", 2, 2.0)
    assert (leanest.outcome.strategy, leanest.micro) == ("zero3", 2), (
        "the fastest of the leanest stage"
    )
    assert [each.seconds for each in found.frontier] == [1.0, 2.0, 2.5, 4.0, 5.0]
    (late,) = found.left_unrehearsed
    assert late.outcome.strategy == "zero2" and not found.only_saves_memory(late)
    assert found.only_saves_memory(candidate("zero2", 1, None, 0))
    text = " ".join(as_text(found).split())
    assert text.startswith(
        "use zero1, micro-batch 2, recomputation off: 6.5 GiB of 8 GiB, 2 s a step (1.6-2.4), 1.5 x as fast as zero2; "
        "zero3, micro-batch 2, would leave 6 GiB free and take 2 x as long; of 6 rehearsed, 1 more may be faster; "
        "on 2 ranks (cuda, 1 node of 2)"
    )
    assert "ddp does not fit: at least 9 GiB." in text
    assert "1 candidates were not rehearsed" in text


def test_of_two_that_are_as_fast_the_one_that_holds_less_is_named():
    found = advice(candidate("zero1", 2, 2.0, 6), candidate("zero2", 2, 2.01, 4))
    assert found.best and found.best.outcome.strategy == "zero2"
    assert "(1.61-2.41), as fast as zero1;" in " ".join(as_text(found).split())
    found = advice(candidate("zero1", 2, 2.0, 6), candidate("zero2", 2, 2.1, 4))
    assert found.best and found.best.outcome.strategy == "zero1"


def test_what_needs_all_of_a_data_sheets_memory_is_tight_and_not_named():
    """A driver may show 2 % less of 80 GiB, and a GiB is the context's and NCCL's: 77.4 are there."""
    config = composed(*TINY, "cluster.gpu=H100")
    unsure = plan_point(config, None, "cuda").outcome.unsure_gib
    assert unsure == pytest.approx(0.02 * 80 + 1)
    config.cluster.reserved_gib = 2
    assert plan_point(config, None, "cuda").outcome.unsure_gib == 0
    points = [candidate("zero2", 2, 1.0, 79.6), candidate("zero3", 2, 2.0, 77.3)]
    on_h100 = {"memory_gib": 80.0, "unsure_gib": unsure}
    points = [e._replace(outcome=replace(e.outcome, **on_h100)) for e in points]
    assert [each.outcome.verdict for each in points] == ["tight", "yes"]
    found = advice(*points)
    assert found.best and found.best.outcome.strategy == "zero3"
    assert "cluster.reserved_gib" in as_text(advice(points[0])) and "--fit" not in as_text(
        advice(points[0])
    )


def test_a_study_keeps_its_precision_and_its_batch(plans_of):
    plans = plans_of("study=compare strategy=zero3 cluster.device=cuda model=tiny")
    config = advise_module._with_defaults(plans.planned[0], plans.named, 1)
    assert (config.precision.name, config.data.global_batch_size) == ("fp32", 2)


@pytest.mark.parametrize(
    ("words", "precision", "stages", "left_out"),
    [
        ("strategy.implementation=torch strategy=ddp", "fp32", "ddp", ""),
        ("strategy.implementation=torch strategy=ddp,zero3", "fp32", "ddp zero3", ""),
        ("strategy.implementation=torch", "bf16_master", "zero2 zero3", "ddp zero1"),
        ("model=tiny model.lora.r=4 model.lora.quantize=int8", "fp32", "ddp zero1 zero2 zero3", ""),
    ],
)
def test_points_that_bf16_masters_leave_undefined_are_compared_in_fp32(
    plans_of, monkeypatch, words, precision, stages, left_out
):
    """A stage that is none of the line's, and is not defined in bf16, is left out with the reason."""
    for name in ("_rehearse_likely_first", "confirm_best"):
        monkeypatch.setattr(advise_module, name, lambda *_: None)
    line = LINE if "model=" not in words else "world_size=2 cluster.device=cuda"
    (found,) = advise(plans_of(f"{line} {words}"))
    assert found.config.precision.name == precision
    assert {each.outcome.strategy for each in found.candidates} == {*stages.split()}
    assert [*found.left_out] == left_out.split()
    told = " ".join(as_text(found).split())
    assert told.count(" is not compared: ") == len(found.left_out)
    assert ("ddp is not compared: " in told) == bool(left_out)


def test_dtypes_of_ones_own_are_told_and_left_to_the_line(plans_of):
    """The name of the precision is that of its file, which has other dtypes."""
    line = f"{LINE} strategy=zero3 data.micro_batch_size=2 train.activation_checkpointing=false"
    for word, told in (
        ("precision.compute=bfloat16", "with bfloat16 (reductions float32, masters float32),"),
        ("precision=bf16", "with bf16,"),
    ):
        (found,) = advise(plans_of(f"{line} {word}"))
        text = " ".join(as_text(found).split())
        assert told in text
        assert ("precision=" in text) == (word == "precision=bf16")


def test_what_is_leaner_holds_less():
    """Of zero2's the fastest holds more than what is named; the leaner one of zero3 was not rehearsed in time."""
    slow = [candidate("zero2", 1, 2.5, 4), candidate("zero3", 1, 2.0, 5)]
    found = advice(candidate("zero2", 2, 2.2, 6), *slow)
    assert found.best and found.leanest
    assert (found.best.outcome.strategy, found.leanest.outcome.peak_bytes) == ("zero3", 4 * GIB)


def test_where_nothing_fits_it_says_so():
    text = as_text(advice(candidate("ddp", 2, 1.0, 9), candidate("zero3", 1, 1.0, 8.5)))
    told = " ".join(text.split())
    assert told.startswith("Nothing fits on 2 ranks (cuda, 1 node of 2)")
    assert "zero3 with micro-batch 1 holds 8.5 GiB. Use more ranks: --fit says how many." in told
    told = " ".join(as_text(advice(candidate("zero3", 1, 1.0, 8.5, "activations"))).split())
    remedy = (
        "Activations and logits take 8.5 GiB on any number of ranks: use a shorter data.seq_len."
    )
    assert remedy in told


def test_what_was_not_rehearsed_yet_may_fit():
    """As where Ctrl-C came before one of them was: of model states alone nothing follows."""
    found = advice(candidate("ddp", 2, 1.0, 9), candidate("zero3", 1, None, 0))
    told = " ".join(as_text(found).split())
    assert told.startswith("Nothing is known yet on 2 ranks") and "Use more ranks" not in told
    assert ": 1 candidates whose model states fit were not rehearsed." in told


@pytest.mark.slow
def test_every_candidate_is_what_a_plan_of_its_words_rehearses(plans_of):
    """As far as model states fit; the work is the line's, in each of them."""
    limit = "cluster.device_memory_gib=0.0012 cluster.device=cpu"
    line = LINE.replace("cluster.device=cuda ", "")
    (entry,) = json.loads(advice_json(plans_of(f"{line} strategy=ddp,zero3 {limit} --rehearse")))
    found = {each["words"]: each for each in entry["candidates"]}
    assert len(found) == 2 * 2 * 2 and {e["global_batch_size"] for e in found.values()} == {4}
    assert {(e["micro_batch_size"], e["recomputes"]) for e in found.values()} == {
        (micro, recomputes) for micro in (1, 2) for recomputes in (False, True)
    }
    fitting = {words: each for words, each in found.items() if each["rehearsed"]}
    assert fitting and all(each["total"]["fullest"] <= 0.0012 * GIB for each in fitting.values())
    assert all(e["total"]["fullest"] > 0.0012 * GIB for e in found.values() if not e["rehearsed"])
    words, chosen = entry["use"], found[entry["use"]]
    seconds = [e["rehearsed"]["step_seconds"][1] for e in fitting.values() if e["fits"] == "yes"]
    assert chosen["rehearsed"]["step_seconds"][1] <= 1.01 * min(seconds)
    (again,) = plans_of(f"{line} {limit} {words} precision=fp32 --rehearse").planned
    assert again.outcome.rehearsed
    assert json.loads(json.dumps(asdict(again.outcome.rehearsed))) == chosen["rehearsed"]


def test_when_time_is_over_it_stops_where_something_fits(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    plans = Plans(ComposedPoints(TINY))
    config = composed(*TINY, "cluster.device_memory_gib=1")
    plans.entries = [plan_point(config, None, "cuda")]
    (found,) = advise(plans, now=iter(range(0, 10**6, 3600)).__next__)
    assert len(found.rehearsed) == 1 and found.best and len(found.candidates) == 4 * 2 * 2
    # What is likely to be the fastest is rehearsed first: the largest micro-batch, without recomputation.
    best = found.best
    assert (best.outcome.strategy, best.micro, best.recomputes) == ("ddp", 2, False)


@pytest.mark.parametrize("form", ["--json ", ""])
def test_an_interrupted_search_tells_what_it_has(planned, monkeypatch, form):
    rehearse, rehearsed = advise_module.with_rehearsal, list[PlannedPoint]()

    def rehearse_two(point: PlannedPoint, *, quick: bool) -> PlannedPoint:
        if len(rehearsed) == 2:
            signals._ask(signal.SIGINT, None)
        rehearsed.append(point)
        return rehearse(point, quick=quick)

    monkeypatch.setattr(advise_module, "with_rehearsal", rehearse_two)
    monkeypatch.setattr(signals, "_num_asked", 0)
    code, out, err = planned(f"--advise {form}--rehearse {LINE} cluster.device_memory_gib=1")
    assert code == INTERRUPTED
    if form:
        (entry,) = json.loads(out)
        found = [each for each in entry["candidates"] if each["rehearsed"]]
        assert len(found) == 2 and entry["use"] in {each["name"] for each in found}
    else:
        assert "interrupted, and --advise --rehearse takes" in " ".join(out.split())
    assert err.endswith(
        "zeroexp: interrupted; what follows is of the candidates that were rehearsed before\n"
    )


def test_on_gpus_a_line_that_leaves_it_open_means_what_people_run(monkeypatch, tmp_path):
    """bf16 with fp32 masters, the model's own 2,048 positions, eight samples for each rank, and an H100's memory."""
    monkeypatch.chdir(tmp_path)
    words = ("model=tiny", "model.hf_config.num_hidden_layers=1")
    plans = Plans(ComposedPoints([*words]))
    for device, expected in (("cuda", ("bf16_master", 2048, 16)), ("cpu", ("fp32", 128, 16))):
        plans.entries = [plan_point(composed(*words, "world_size=2"), None, device)]
        (found,) = advise(plans, now=iter(range(0, 10**6, 3600)).__next__)
        planned = found.candidates[-1]
        assert (" reserved, " in as_text(found)) == (device == "cuda")
        config, data = planned.config, planned.config.data
        assert planned.outcome.memory_gib == (80 if device == "cuda" else None)
        assert (config.precision.name, data.seq_len, data.global_batch_size) == expected


@pytest.mark.parametrize(("micro", "batch"), [(1, 16), (3, 12), (5, 10), (16, 32)])
def test_a_batch_that_is_left_open_is_one_of_whole_microbatches(micro, batch):
    words = (f"{MICRO}={micro}", f"{BATCH}={2 * micro}")
    planned = plan_point(composed(*WORDS, *words), None, "cpu")
    assert advise_module._with_defaults(planned, {MICRO}, micro).data.global_batch_size == batch


@pytest.mark.parametrize("word", ["", "data", "study", SEQ_LEN])
def test_sequences_are_as_long_as_the_context_only_where_no_data_are_named(word):
    planned = plan_point(composed("model=tiny"), None, "cuda")
    seq_len = advise_module._with_defaults(planned, {word}, 1).data.seq_len
    assert seq_len == (planned.config.data.seq_len if word else 2048)


def test_only_ways_to_do_the_same_work_are_compared(plans_of, monkeypatch):
    for name in ("_rehearse_likely_first", "confirm_best"):
        monkeypatch.setattr(advise_module, name, lambda *_: None)
    found = advise(plans_of(f"{LINE} strategy=zero1,zero2 cluster.gpu=L4,B200"))
    for each, gpu in zip(found, ("L4", "B200"), strict=True):
        told = {(e.outcome.strategy, e.config.cluster.gpu) for e in each.candidates}
        assert told == {("zero1", gpu), ("zero2", gpu)}
        assert f"({each.settings})" in as_text(each) and gpu in each.settings
    (found,) = advise(plans_of(f"{' '.join(WORDS)} cluster.device=cpu {MICRO}=3,4"))
    assert {e.config.data.global_batch_size for e in found.candidates} == {2 * 12}
    assert {e.micro for e in found.candidates} == {3, 4} and not found.settings


@pytest.mark.parametrize(
    "line", ["strategy=ddp,zero3 strategy.implementation=buffer,torch", "study=compare"]
)
def test_engines_are_compared_in_one_answer(plans_of, line):
    """Whatever is filled in for each: DDP's views of buckets are no other work."""
    plans = plans_of(f"model=tiny cluster.device=cpu {line}")
    works = {advise_module._work_of(each.config, plans.named) for each in plans.planned}
    assert len(works) == 1


def test_the_own_settings_of_an_engine_are_no_other_work():
    words = ("model=tiny", "strategy=zero2", "strategy.implementation=deepspeed")
    works = {
        advise_module._work_of(plugins.with_settings(config), {"strategy.implementation"})
        for config in (composed(*words), composed(*words[:2]))
    }
    assert len(works) == 1


def test_an_engine_that_can_not_be_rehearsed_leaves_the_others(monkeypatch):
    def rehearsed(point: PlannedPoint, *, quick: bool) -> PlannedPoint:
        of = by_name[point.outcome.name].outcome
        return point._replace(outcome=replace(of, not_rehearsed=None if of.rehearsed else "values"))

    points = [candidate("zero1", 2, None, 0), candidate("zero3", 2, None, 0)]
    points.append(candidate("zero2", 1, 2.0, 5))
    names = ("deepspeed", "deepspeed 3", "buffer")
    points = [
        each._replace(outcome=replace(each.outcome, implementation=name.split()[0], name=name))
        for each, name in zip(points, names, strict=True)
    ]
    by_name: dict[str, PlannedPoint] = dict(zip(names, points, strict=True))
    monkeypatch.setattr(advise_module, "with_rehearsal", rehearsed)
    found = advice(*(e._replace(outcome=replace(e.outcome, rehearsed=None)) for e in points))
    advise_module._rehearse_likely_first(found, None, lambda: 0.0)
    assert found.best and found.best.outcome.implementation == "buffer"
    assert as_text(found).count("deepspeed is not compared: values.") == 1
    assert not found.left_unrehearsed and " were not rehearsed" not in as_text(found)


def test_what_is_named_is_another_one_where_its_full_rehearsal_fails(monkeypatch):
    def fails(config: Config, rank: int, **_: object) -> None:
        raise ConfigError(f"{config.strategy.name} asks for values")

    monkeypatch.setattr(rehearse_module, "rehearse", fails)
    found = advice(candidate("zero1", 1, 1.0, 5))
    advise_module.confirm_best(found)
    assert found.best is None and "zero1 asks for values" in as_text(found)


def test_the_benchmark_of_advice_rehearses_all_candidates(monkeypatch):
    gives_time: list[bool] = []

    def advices(plans: Plans) -> list[Advice]:
        gives_time.append(plans.gives_time)
        return [advice(candidate("zero1", 1, 1.0, 5))]

    monkeypatch.setattr(advised, "advise", advices)
    advised.advice_of(" ".join(WORDS))
    assert gives_time == [True]


@pytest.mark.parametrize("flag", [plan.ADVISE, plan.FIT])
def test_what_rehearses_others_rehearses_no_point_of_the_line_first(flag, planned, monkeypatch):
    monkeypatch.setattr(plan_points, "with_rehearsal", lambda *_: pytest.fail("a point"))
    monkeypatch.setitem(plan.FORMS, flag, lambda plans: f"gives time: {plans.gives_time}")
    code, out, _ = planned(f"{flag} --rehearse {LINE}")
    assert (code, out.strip()) == (0, "gives time: True")


def test_a_named_gpu_sets_the_limit_and_the_speed():
    config = composed(*WORDS, "cluster.gpu=L4", "cluster.reserved_gib=2")
    assert plan_point(config, None, "cuda").outcome.memory_gib == 22
    config.cluster.device_memory_gib = 10
    assert plan_point(config, None, "cuda").outcome.memory_gib == 8


@pytest.mark.slow
def test_advice_for_an_optimizer_that_steps_whole_matrices(planned):
    """The layout of the default cuts them, and is advised like another; what FSDP2 cuts is refused."""
    line = (
        "model=tiny model.hf_config.num_hidden_layers=1 world_size=2 optimizer=muon data.global_batch_size=2 "
        "data.seq_len=8"
    )
    recomputes = "train.activation_checkpointing=true"
    code, text, _ = planned(f"--advise --json {line} strategy=ddp,zero2 {recomputes}")
    (entry,) = json.loads(text)
    words = {each["words"].partition(" data.")[0] for each in entry["candidates"]}
    assert code == 0 and words == {"strategy=ddp", "strategy=zero2"}
    code, _, told = planned(f"--advise {line} strategy=zero2 strategy.implementation=torch")
    assert code == 2 and "torch cuts the matrices that optimizer.name=muon steps whole" in told
