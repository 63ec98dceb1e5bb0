"""`zeroexp plan`: the words of a run in, every rank's bytes out, no file left."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from zeroexp.config.keys import ConfigError
from zeroexp.plan import __main__ as plan
from zeroexp.plan import fit, plan_points
from zeroexp.plan.explain_plan import explain
from zeroexp.plan.fit import fit_json, fit_lines
from zeroexp.plan.outcome import PlannedPoint
from zeroexp.plan.peak import with_rehearsal
from zeroexp.plan.plan_points import Plans
from zeroexp.plan.plan_table import as_csv, as_json, render
from zeroexp.process import signals

GIB, MIB = 2**30, 2**20
P7 = 6_738_415_616 * 4  # bytes of LLaMA 7B's parameters in fp32


def rows_of(plans: Plans) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(as_csv(plans))))


def one_line(text: str) -> str:
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


def test_7b_at_1024_ranks(plans_of):
    """The published skew and idle ranks, and 16 P / N but for padding."""
    line = "model=llama_7b world_size=1024 strategy=zero3 strategy.implementation=parameter,buffer"
    whole, flat = json.loads(as_json(plans_of(f"{line} strategy.keep=none cluster.device=cuda")))
    assert whole["skew"] == pytest.approx(19.9, abs=0.05) and whole["num_idle_ranks"] == 733
    assert len(flat["total"]["per_rank"]) == 1024
    states = sum(flat["by_kind"][k]["fullest"] for k in ("parameters", "gradients", "optimizer"))
    assert 1 <= states / (4 * P7 / 1024) < 1.001
    assert flat["place"] == "cuda, 128 nodes of 8"
    # 3P (N-1)/N, padding and the norm included; one message in eight leaves its node.
    assert flat["sent"]["mean"] == pytest.approx(3 * P7 * 1023 / 1024, rel=3e-4)
    assert flat["sent_between"] == pytest.approx(flat["sent"]["mean"] / 8)


def test_copies_inside_of_a_node_are_planned_for_the_nodes_that_the_plan_has(plans_of):
    line = "model=tiny world_size=16 strategy=zero3 strategy.secondary_partition=8"
    line += " data.global_batch_size=16 data.micro_batch_size=1 cluster.device"
    (entry,) = json.loads(as_json(plans_of(f"{line}=cuda")))
    assert entry["place"] == "cuda, 2 nodes of 8" and entry["by_kind"]["secondary"]["fullest"]
    one_node = "16 ranks that shard are on one node"
    with pytest.raises(ConfigError, match=f"{one_node}.*; use cluster=slurm or"):
        plans_of(f"{line}=cpu")
    with pytest.raises(ConfigError, match=f"{one_node}.*; use a lower .*ranks_per_node"):
        plans_of(f"cluster=slurm cluster.slurm.ranks_per_node=16 {line}=cuda")


def test_every_engine_and_what_is_skipped(plans_of):
    line = "model=tiny world_size=2 strategy=ddp,zero1_allreduce,zero3 cluster.device=cpu"
    plans = plans_of(f"{line} strategy.implementation=parameter,tensor,buffer,torch")
    rows = rows_of(plans)
    skipped = [row for row in rows if row["skipped"]]
    assert len(rows) == 12
    assert [(r["strategy"], r["implementation"]) for r in skipped] == [("zero1_allreduce", "torch")]
    assert "use zero1" in skipped[0]["skipped"] and skipped[0]["total_bytes"] == ""
    assert all(float(row["total_bytes"]) > 0 for row in rows if not row["skipped"])


@pytest.mark.slow
def test_the_table_keeps_to_80_columns(plans_of):
    line = "model=llama_7b world_size=8,64 strategy=ddp,zero1_allreduce precision=fp32,bf16_master"
    words = "strategy.implementation=parameter,torch cluster.device_memory_gib=200"
    told = one_line(render(plans_of(f"{line} {words}")))
    assert "skipped zero1_allreduce-torch-n8" in told
    assert "with 64" in told, "the batch that is planned instead of 12"


@pytest.mark.slow
def test_a_study_is_planned_point_by_point(planned):
    code, out, _ = planned("study=compare --json")
    names = [entry["name"] for entry in json.loads(out)]
    assert code == 0 and len(names) == 10 and "zero3-tensor-n2" in names


def test_a_folder_of_ones_own_configs_is_planned_as_it_is_run(planned, tmp_path_factory):
    own = tmp_path_factory.mktemp("own")
    (own / "cluster").mkdir()
    (own / "cluster/mine.yaml").write_text("# @package cluster\ndevice: cuda\n")
    line = "model=tiny world_size=2 cluster=mine --json"
    for folder in (f"--config-dir {own}", f"-cd={own}"):
        code, out, err = planned(f"{folder} {line}")
        assert code == 0, err
        assert json.loads(out)[0]["place"].startswith("cuda")
    code, _, err = planned(line)
    assert code == 2 and err.startswith("zeroexp: cluster=mine:")


def test_what_does_not_fit_is_told_what_to_change(plans_of):
    """DDP holds 4 P = 100 GiB; ZeRO-2 P and 3 P / 8; ZeRO-3 4 P / 8, and on 16 ranks half of that."""
    line = "model=llama_7b world_size=8 strategy=ddp,zero3 cluster.device=cuda"
    ddp, zero3 = plans_of(f"{line} cluster.device_memory_gib=48").planned
    assert (ddp.outcome.verdict, zero3.outcome.verdict) == ("no", "tight")
    told = one_line(render(plans_of(f"{line} cluster.device_memory_gib=10")))
    assert "zero3-buffer-n8 does not fit 10 GiB; --fit finds the ranks" in told


# Command line -> the start of the line that refuses it, and a part of its remedy.
# What runs refuse as well: tests/test_wrong_configs.py.
WRONG = {
    "world_size=-8": ("world_size=-8:", "use at least 1"),
    "world_size=65537": ("world_size=65537: every rank is planned", "use at most 65536"),
    "cluster.device=tpu": ("cluster.device=tpu:", "auto, cpu, cuda"),
    "cluster.device_memory_gib=0": ("cluster.device_memory_gib=0", "use more than 0"),
    "cluster.reserved_gib=2": (
        "cluster.reserved_gib=2.0: no effect",
        "set cluster.device_memory_gib",
    ),
    "cluster.device_memory_gib=2 cluster.reserved_gib=2": (
        "cluster.reserved_gib=2.0: leaves nothing of cluster.device_memory_gib=2",
        "use less",
    ),
    "cluster.gpu=L4 cluster.reserved_gib=30": (
        "cluster.reserved_gib=30.0: leaves nothing of the 24 GiB of cluster.gpu=L4",
        "use less",
    ),
    "model=llama_8b": ("model=llama_8b:", "did you mean llama3_8b?"),
    "model.hf_config.vocab_size=many": ("model.hf_config.vocab_size=many:", "expected int"),
    "model.hf_config.hidden_size=0": ("model.hf_config.hidden_size=0:", "use one"),
    "world_size=4 data.global_batch_size=6": ("data.global_batch_size=6:", "use 4 or 8"),
    "study=table_z": ("study=table_z:", "compare"),
    "cluster.gpu=H300": ("cluster.gpu=H300:", "H200"),
    "cluster.network=ether": ("cluster.network=ether:", "nvlink-ethernet"),
    "cluster.gpu=H100 cluster.device=cpu": ("cluster.gpu=H100: no effect", "cluster.device=cuda"),
    "world_size=4 strategy=ddp strategy.replicas=2": ("strategy.replicas=2:", "every rank is a"),
    "world_size=4 strategy=zero3 strategy.replicas=3": ("strategy.replicas=3:", "use 1, 2"),
    "world_size=4 strategy=zero3 strategy.replicas=4": ("strategy.replicas=4:", "this is ddp"),
    "world_size=4 strategy=zero1 strategy.replicas=2 strategy.implementation=torch": (
        "strategy.replicas=2:",
        "over all ranks",
    ),
    "--fast": ("--fast:", "use one of --json"),
    "--json --csv": ("--json --csv:", "leave out all but one"),
    "--advise --csv": ("--advise --csv:", "leave out all but one"),
    "--cfg job": ("--cfg:", "use one of"),
    "hydra/sweeper=optuna": ("hydra/sweeper=optuna:", "leave it out"),
    "model=tiny,mlp_1b --explain": ("--explain: one point, not 2;", "one value"),
    "model=tiny --config-dir /nowhere": ("--config-dir /nowhere: no such folder;", "use one that"),
    "model=tiny --fit": ("cluster.device_memory_gib=null:", "memory of one device"),
}


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_is_one_line(line, planned):
    code, out, err = planned(line)
    assert code == 2 and out == "" and len(err.splitlines()) == 1, err
    start, remedy = WRONG[line]
    assert err.startswith(f"zeroexp: {start}") and remedy in err


def test_no_place_for_temporary_files_is_one_line(planned, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/1/nowhere")
    code, out, err = planned("model=tiny data=synthetic")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1, err
    assert err.startswith("zeroexp: TMPDIR=") and "set TMPDIR" in err


@pytest.mark.slow
def test_planning_needs_neither_outputs_nor_weights_nor_a_hub(tmp_path):
    """As a process of its own, in a folder that nobody may write to."""
    root = Path(plan.__file__).resolve().parents[2]
    words = ["model=smollm2_135m", "model.weights=me/not-there", "outputs=/proc/no", "world_size=4"]
    done = subprocess.run(
        [sys.executable, "-m", "zeroexp.plan", *words, "cluster.device=cpu"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "smollm2_135m" in done.stdout and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--json", "--csv"])
def test_json_and_csv_tell_the_batch_that_is_planned(planned, flag):
    _, out, err = planned(f"model=tiny world_size=8 strategy=zero3 cluster.device=cuda {flag}")
    row = json.loads(out)[0] if flag == "--json" else next(csv.DictReader(io.StringIO(out)))
    assert [str(row[key]) for key in ("global_batch_size", "seq_len")] == ["8", "128"]
    assert err == "data.global_batch_size=12 is not divisible by 8 ranks: planned with 8\n"


def test_fit_tells_of_no_batch_that_it_does_not_use(planned):
    words = "model=tiny world_size=8 strategy=zero3 cluster.device=cuda"
    status, out, err = planned(f"{words} cluster.device_memory_gib=1e-4 --fit")
    assert (status, err) == (0, "zero3 buffer: rehearsing\n") and "not up to 4096" in out


# -- rehearsed -------------------------------------------------------------------------------------

VECTORS = "model=mlp_tiny data=vectors data.seq_len=16 world_size=2"


def test_a_point_is_tight_until_a_rehearsal_finds_its_peak(plans_of):
    (point,) = plans_of(f"{VECTORS} strategy=zero3 cluster.device=cuda").planned
    states, rehearsed = point.outcome.total.fullest, with_rehearsal(point)
    assert rehearsed.outcome.rehearsed
    fullest = rehearsed.outcome.rehearsed.fullest
    peak = fullest.reserved_bytes or 0  # the allocator holds what is allocated, and more
    assert states < fullest.num_bytes < peak == fullest.needed_bytes
    for each, limit, verdict in (
        (point, states - 1, "no"),
        (point, states, "tight"),
        (rehearsed, peak - 1, "no"),
        (rehearsed, peak, "yes"),
    ):
        assert replace(each.outcome, memory_gib=limit / GIB).verdict == verdict


def test_where_a_line_fits_is_told_to_programs_as_to_readers(plans_of):
    """What half as many ranks hold does not fit, and of a limit below any rank's there is no plan."""
    words = f"{VECTORS} strategy=zero3 data.micro_batch_size=1 data.global_batch_size=2"
    (two,) = plans_of(words).planned
    limit = with_rehearsal(two).outcome.peak_bytes
    for gib, size in ((limit / GIB, 2), (limit / 100 / GIB, None)):
        plans = plans_of(f"{words} cluster.device_memory_gib={gib}")
        (entry,) = json.loads(fit_json(plans))
        assert entry["world_size"] == size and (entry["plan"] is None) == (size is None)
        if entry["plan"]:
            assert entry["micro_batch_size"] == 1
            assert entry["peak_bytes"] == limit == round(entry["limit_bytes"])
            assert entry["plan"]["world_size"] == size and entry["plan"]["fits"] == "yes"
        assert one_line(fit_lines(plans)).count("not up to 64") == (size is None)


def test_what_fits_a_named_gpu_leaves_what_driver_and_nccl_may_take(plans_of):
    """As --advise does: of the 24 GiB of an L4 6 %, and a GiB."""
    words = "model=mlp_tiny data=vectors data.seq_len=8192 strategy=ddp cluster.device=cuda"
    plans = plans_of(f"{words} cluster.gpu=L4")
    (entry,) = json.loads(fit_json(plans))
    samples = entry["micro_batch_size"]
    assert entry["limit_bytes"] == pytest.approx((24 - 0.06 * 24 - 1) * GIB, abs=1)
    assert "fits 21.56 GiB (of 24, of which driver" in one_line(fit_lines(plans))
    for more, verdict in ((0, "yes"), (1, "tight")):
        batch = f"data.micro_batch_size={samples + more} data.global_batch_size={samples + more}"
        (point,) = plans_of(f"{words} cluster.gpu=L4 world_size=1 {batch} --rehearse").planned
        assert point.outcome.verdict == verdict


@pytest.mark.slow
def test_what_is_reserved_stands_beside_what_is_allocated_on_gpus_alone(plans_of, monkeypatch):
    """Of a CPU there is no allocator that keeps memory; the settings are those of the environment."""
    for device, setting in (("cpu", None), ("cuda", "False"), ("cuda", "True")):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{setting or True}")
        plans = plans_of(f"{VECTORS} strategy=zero3 cluster.device={device} --rehearse")
        text, (entry,) = one_line(render(plans)), json.loads(as_json(plans))
        ranks, allocator = entry["rehearsed"]["ranks"], entry["rehearsed"]["allocator"]
        reserved = [rank["reserved_bytes"] for rank in ranks]
        assert (" reserved " in text) == (None not in reserved) == bool(setting)
        assert (f"{allocator}, all that is modelled of" if setting else "") in text
        assert allocator == (f"expandable_segments:{setting}" if setting else "")
        assert setting is None or all(rank["reserved_bytes"] > rank["num_bytes"] for rank in ranks)
        row = next(csv.DictReader(io.StringIO(as_csv(plans))))
        assert row.get("reserved_bytes") == (str(max(reserved)) if setting else None)


@pytest.mark.slow
def test_a_step_fits_tightly_where_the_allocator_must_make_room_in_it(plans_of):
    """Above what is allocated and below what it takes alone, it gives back segments that are free."""
    words = "data.seq_len=512 data.micro_batch_size=2 data.global_batch_size=4"
    line = f"model=tiny world_size=2 strategy=zero3 cluster.device=cuda {words}"
    (point,) = plans_of(line).planned
    unlimited = with_rehearsal(point).outcome.rehearsed
    assert unlimited
    most = unlimited.fullest.reserved_bytes or 0
    for limit, verdict in ((most, "yes"), (most - 4 * MIB, "tight"), (most - 6 * MIB, "no")):
        outcome = replace(point.outcome, memory_gib=limit / GIB)
        limited = with_rehearsal(point._replace(outcome=outcome)).outcome
        peak = limited.rehearsed and limited.rehearsed.fullest
        assert peak and limited.verdict == verdict
        assert (peak.num_retries > 0) == (verdict == "tight")
        assert (peak.reserved_bytes == most) == (verdict != "tight")


def test_what_is_interrupted_tells_what_it_has(plans_of, monkeypatch, capsys):
    line = "model=tiny strategy=ddp,zero3 world_size=2 cluster.device_memory_gib=1"

    def ask_at_zero3(point: PlannedPoint) -> PlannedPoint:
        if point.outcome.strategy == "zero3":
            signals._ask(signal.SIGTERM, None)
        return point

    monkeypatch.setattr(signals, "_num_asked", 0)
    monkeypatch.setattr(plan_points, "with_rehearsal", ask_at_zero3)
    (point,) = plans_of(f"{line} --rehearse").planned
    told = "zeroexp: interrupted; what follows is of the"
    assert point.outcome.strategy == "ddp"
    assert capsys.readouterr().err == f"{told} points that were planned before\n"

    both = plans_of(line)
    monkeypatch.setattr(signals, "_num_asked", 0)
    monkeypatch.setattr(fit, "fewest_ranks", lambda point: ask_at_zero3(point) and None)
    (row,) = json.loads(fit_json(both))
    assert row["strategy"] == "ddp" and f"{told} rows that were made" in capsys.readouterr().err


@pytest.mark.slow
def test_fit_finds_the_fewest_ranks_and_the_largest_batch(plans_of, capsys):
    """DDP's 16 P bytes never fit. What fits is rehearsed again: one sample more does not."""
    line = "model=mlp_tiny data=vectors data.seq_len=16 cluster.device=cpu cluster.device_memory_gib=0.0008"
    out = fit_lines(plans_of(f"{line} strategy=ddp,zero3 world_size=2 data.micro_batch_size=1"))
    ddp, zero3 = (text for text in out.splitlines() if text.startswith("mlp_tiny"))
    assert "not up to 64" in ddp
    model, stage, layout, ranks, *_, batch, _ = zero3.split()
    assert (model, stage, layout) == ("mlp_tiny", "zero3", "buffer")
    tries = capsys.readouterr().err  # some models take minutes for each
    for samples, verdict in ((int(batch), "yes"), (int(batch) + 1, "no")):
        words = f"data.micro_batch_size={samples} data.global_batch_size={samples * int(ranks)}"
        assert f"{words}: " in tries
        (point,) = plans_of(f"{line} strategy=zero3 world_size={ranks} {words} --rehearse").planned
        assert point.outcome.verdict == verdict


@pytest.mark.slow
def test_fit_tells_what_it_skips(plans_of):
    line = f"{VECTORS} strategy.implementation=torch strategy=zero3,zero1_allreduce"
    told = one_line(fit_lines(plans_of(f"{line} cluster.device_memory_gib=1")))
    assert "skipped zero1_allreduce-torch-n2" in told and "use zero1" in told


def test_explain_names_what_makes_the_peak(plans_of):
    plans = plans_of(f"{VECTORS} cluster.device=cuda strategy=zero3")
    (point,) = plans.planned
    out = explain(plans)
    rehearsed = with_rehearsal(point).outcome.rehearsed
    assert rehearsed
    peak = rehearsed.fullest
    told = f"rank {peak.rank} holds {peak.num_bytes / MIB:.1f} MiB at most, in {peak.phase}, "
    told += "for which torch's caching allocator (expandable_segments:False) reserves "
    assert f"{told}{(peak.reserved_bytes or 0) / MIB:.1f}:" in one_line(out)
    kinds = [text.split()[1] for text in out.splitlines() if text.startswith("     ")]
    assert {*peak.by_kind, "parameters", "optimizer"} <= {*kinds}
