"""Checkpoints hold what a run needs to continue, by parameter name, so that any engine and world size can load them.

    <run>/checkpoint/step-000020/     after 20 steps; the folder gets this name only when it is complete
        manifest.json                 versions, config, step, shapes, and the place and hash of each piece
        rank0.bin .. rank<N-1>.bin    the contribution of each rank: raw numbers, one piece after the other
    <run>/checkpoint/.step-000040.0/  attempt 0 of the run is writing it: never read, removed at the next start

A piece is a contiguous range of one flattened tensor, which is general enough for every engine's layout
(`interface/strategy.py`). No tensor is ever assembled: ranks write what they hold, and read the ranges they need from
files mapped into memory. There is no pickle: files are JSON and raw numbers.

    manifest.py   describes a checkpoint and its hashes                                                  no torch
    folders.py    names, the rename that completes one, which ones are kept, outdated attempts           no torch
    resume.py     finds the checkpoint that `resume` means and checks that it fits                       no torch
    optimizers_fit.py  whether each weight keeps the optimizer that it had, and that its moments
    check_hashes.py  reads pieces and checks the hash of each                                            no torch
    staging.py    copies this rank's pieces, so that training goes on while they are written
    storage.py    writes each rank's file, and puts the manifest together
    save.py       copies, then writes in a thread: the files, the manifest and the folder's name
    load.py       checks every hash, then fills the engine from mapped files
    weights.py    reads whole weights for the export
    rng.py        converts random states to plain numbers

docs/checkpoints.md says what is equal to what after a resume.
"""
