"""How fast every engine is, at which memory and traffic, in one interleaved run.

    run.py      the parent: starts the ranks of all engines of a comparison, wakes them in turn, writes rows
    ranks.py    the processes: one group of ranks per engine, long-lived, blocked on a pipe while others are timed
    engines.py  what is compared, each engine at its best settings; peers.py: those that zeroexp does not ship
    links.py    a slow link: two network namespaces joined by a shaped pair, removed whatever happens
    tuned.py    ours beside peers at their best; tunable.py: what these can be set to, and who carries their messages
    muon_peers.py    Muon beside torch's two ways for it, which are in muon_loops.py
    table.py    what was measured -> docs/measured.md; every row -> measured/
    targets.py  what we aim at, beside what was measured
    check.py    rows against the stored ratios: what got worse
    gpu.py      one GPU, self-contained
    promise.py  whether what a plan says of memory comes true under a limit
    accuracy.py how far bytes, peaks and seconds of a plan are from those of runs (real_runs.py)
    advised.py  whether what `--advise` names is the fastest that fits
    breakdown.py     where the milliseconds of a step go
    growth.py        what a step costs the host as layers, parameters and ranks grow; planted growth is found
    between.py       is one checkout, or one setting, slower than another
    building.py      what a rank of many allocates to build its share of a model
    instruments.py   what measuring costs a step
    published_run.py a published table of memory as a real run, beside its plan
    checkpoints.py   saving and loading instead of steps, by ranks of checkpoint_ranks.py, in the ways of savers.py

Pages: scaling_page.py, published_page.py (of published_tables.py), silent_bugs.py (by silent_loops.py), and
report_pictures.py for the pictures of one.

[Note: a turn] An engine may leave an all-gather in flight at the end of a step, which whoever runs next would pay.
So a turn is several steps between two barriers, with everything drained at both ends; engines take turns within a
round, in an order drawn anew for each round, so that a disturbance of the machine hits all of them alike. Numbers are
medians over turns, ratios are ratios of medians of one comparison.
"""
