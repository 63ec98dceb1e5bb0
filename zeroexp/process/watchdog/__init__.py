"""Whether the ranks of a job live, advance and do the same. Ranks write, and whoever reads tells.

    what a rank writes                    how it gets there                         the reader            verdict
    its task's beats                      one connection to the task of rank 0      that task (and back)  lost.py
    step, phase, number of moves          shared memory, then the task's beats      that task             hung.py
    rank 0: its last moves                the store of the process group            every other rank      differs.py

Where one process starts all ranks, it needs no beats. The first two are told by processes beside the ranks, since one
that is stopped, or in a long call of C++, tells nothing of itself. The third needs no launcher, and ends the waits
inside of the ranks by an error in words. Nobody is accused of being slow before the first step, or while it saves or a
debugger holds it; a step that compiles has `cluster.hang_s`.

Each rank costs a beat three times in `cluster.heartbeat_s`, and nothing else while it advances; when it has issued no
move for some seconds, two short requests a second more.
"""
