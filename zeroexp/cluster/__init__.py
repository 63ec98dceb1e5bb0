"""Ranks run on a cluster: the job that a cluster is given, the clusters, and the sweep that submits the jobs.

sweep.py            from composed points to an exit code; fits_memory.py: which points can not fit
make_runs.py        their folders, all or none; environment.py: what else a run depends on
job.py              one run: a folder, and a state that outlives this process
local_points.py     points of this machine: tried, run, rehearsed, run again; local.py: this machine as a cluster,
                    forkserver.py forks the ranks, supervise.py watches them until all have ended, and
                    emulated_network.py puts them on nodes (`cluster.link`)
submit.py           to Slurm; batch_file.py: what a job asks for; code_snapshot.py: the code that it runs
task.py             one task of a Slurm job; rank_entry.py: its rank
follow.py           Slurm's jobs until they end; slurm_state.py asks Slurm; tell.py tells of an end that is not good
"""
