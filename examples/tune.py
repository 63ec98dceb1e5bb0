"""python examples/tune.py [word ...]: a loop for machines, which only calls `zeroexp ... --json`.

Each try changes one key of the best settings so far. It is planned, and skipped where it is refused or cannot fit; then
it takes turns with the best. It is kept only if its verdict is "faster" and all losses agree with those of PyTorch in
one process. Each try is a line of results.tsv; the last one is the best beside the start.

    python examples/tune.py model=tiny data.global_batch_size=4 cluster.device_memory_gib=1 repeats=5
"""

import json
import subprocess
import sys
from pathlib import Path

SPACE = {  # the first of each is the start, a bad one
    "train.activation_checkpointing": ["true", "false"],
    "strategy.implementation": ["parameter", "buffer", "tensor"],
    "strategy.unit": ["module", "block", "model"],
    "strategy.overlap": ["false", "true"],
    "strategy.keep": ["none", "last", "all"],
    "strategy.reduce_codec": ["null", "int4"],  # sends fewer bytes, and trains another model
}
ORACLE = ["world_size=1", "strategy=ddp", "strategy.implementation=torch", "repeats=1"]
ALWAYS = ["study.loss_agreement=1e-5", "outputs=outputs", "tracking=files", "cluster.rehearse_s=0"]
COLUMNS = ["tried", "step_seconds", "step_seconds_low", "step_seconds_high", "peak_bytes"]
COLUMNS += ["ratio", "ratio_low", "ratio_high", "verdict", "doubt", "why_not"]


def zeroexp(*words):
    """Return the object that a command prints, or None, and its last line for people, which says why."""
    command = [sys.executable, "-m", "zeroexp", *words]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    return json.loads(done.stdout or "null"), (done.stderr.splitlines() or ["no answer"])[-1]


def attempt(words, oracle, best, new):
    """Return what results.tsv says of `new`: its numbers, and why it is not kept, which is empty if it is."""
    plans, line = zeroexp("plan", *words, *(f"{key}={new[key]}" for key in new), "--json")
    if not plans or "skipped" in plans[0] or plans[0]["fits"] == "no":
        return {"why_not": plans[0].get("skipped", "does not fit") if plans else line}
    swept = [key for key in new if new[key] != best[key]]  # of their products two points are left
    rows = ["{" + ",".join(f"{key}:[{each[key]}]" for key in swept) + "}" for each in (best, new)]
    pair = [f"{key}={best[key]},{new[key]}" if key in swept else f"{key}={new[key]}" for key in new]
    told, line = zeroexp(*words, *pair, f"study.include=[{','.join(rows)}]", "--json")
    if not told:
        return {"why_not": line}
    points = [*oracle["points"], *told["points"]]
    folders = dict.fromkeys(f"outputs/{point['sweep']}" for point in points)
    losses = zeroexp("report", *folders, "--json", "-")[0]["losses"]
    return {**points[-1], "why_not": why_not(points, told["broken"], losses["curves"])}


def why_not(points, broken, curves):
    """Return why the last of the points is not kept: all must end and be equal, and it must be faster."""
    by_name = {curve["point"]: curve for curve in curves}
    for point in points:
        curve = by_name.get(f"{point['sweep']}/{point['point']}", {"difference": "?", "step": "?"})
        if point["status"] != "done":
            return f"{point['status']}: {' '.join((point['reason'] or '').split())}"
        if not curve.get("agrees"):
            return f"unequal: loss off by {curve['difference']} at step {curve['step']}"
    verdict = points[-1]["verdict"]
    return broken[0] if broken else "" if verdict == "faster" else f"not faster: {verdict}"


def search(words, space, table):
    """Return the best settings found. Each value is tried once, upon the best so far, which ends beside the start."""
    words, start = [*words, *ALWAYS], {key: values[0] for key, values in space.items()}
    oracle, line = zeroexp(*words, *ORACLE, "--json")
    if not oracle:
        sys.exit(line)
    best, lines = start, [COLUMNS]
    for change in [*({key: value} for key in space for value in space[key][1:]), {}]:
        old, new = (best, {**best, **change}) if change else (start, best)
        if new != old:
            tried = " ".join(f"{key}={new[key]}" for key in new if new[key] != old[key])
            row = {"tried": tried, **attempt(words, oracle, old, new)}
            lines.append([str(row.get(name) or "") for name in COLUMNS])
            table.write_text("\n".join(map("\t".join, lines)) + "\n", encoding="utf-8")
            best = best if row["why_not"] else new
    return best


if __name__ == "__main__":
    print(*(f"{k}={v}" for k, v in search(sys.argv[1:], SPACE, Path("results.tsv")).items()))
