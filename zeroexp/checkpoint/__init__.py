"""Checkpoints: what a run needs to go on, by parameter name, so that any engine and world size can take it up.

    <run>/checkpoint/step-000020/     after 20 steps; the folder has this name when it is whole, never before
        manifest.json                 what it is: versions, config, step, shapes, where each piece lies, its hash
        rank0.bin .. rank<N-1>.bin    what each rank contributed: raw numbers, one piece behind the other
    <run>/checkpoint/.step-000040.0/  being written, by attempt 0 of the run: never read, removed at the next start

A piece is a contiguous range of one flattened tensor: all that an engine's layout can be (`strategies/base.py`). No
tensor is ever put together: ranks write what they hold, and read the ranges they need out of files mapped into memory.
There is no pickle in it: JSON and raw numbers.

    manifest.py   what is said about a checkpoint, and its hashes                                        no torch
    folders.py    names, one rename that makes it whole, what is kept, what an older attempt may not do  no torch
    resume.py     which checkpoint `resume` means, and whether it fits                                   no torch
    staging.py    copies of this rank's pieces, so that training goes on while they are written
    planner.py    what each rank writes, in the words of torch.distributed.checkpoint; storage.py how
    save.py       when: copy, then write in a thread
    load.py       check every hash, then fill the engine from mapped files
    rng.py        random states as plain numbers

docs/checkpoints.md says what equals what after a resume.
"""
