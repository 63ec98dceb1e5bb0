"""Planners side by side: what each says of memory, beside what was measured: `python -m benchmarks.planners`.

    point.py      what a planner is told of a point, and what it may answer
    points.py     the points: those trained here, those of a GPU and of publications, with the bytes that they took
    tools.py      which planners there are, where they come from, and how one is asked
    asked.py      the process that asks one, among its own packages
    of_*.py       a planner each: the point in its words
    score.py      signed errors, and how often "fits" was wrong, as a table
    __main__.py   the command

[Note: can't say] A planner is told a point as it is, and none is bent until it fits: where a planner has no word for
the stage, the dtypes or the model, its answer is the reason. Words that it has and that change nothing there are set.
"""
