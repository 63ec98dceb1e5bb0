"""Ranks run on a cluster: the job that a cluster is given, the clusters, and the sweep that submits the jobs.

sweep.py            from composed points to an exit code; fits_memory.py: which points can not fit
job.py              one run: a folder, and a state that outlives this process; environment.py: what else it depends on
local.py            this machine; forkserver.py forks the ranks, supervise.py watches them until all have ended,
                    emulated_network.py puts them on nodes (`cluster.link`), machine_load.py tells of others' load
submit.py           to Slurm; batch_file.py: what a job asks for; code_snapshot.py: the code that it runs
task.py             one task of a Slurm job; rank_entry.py: its rank
follow.py           Slurm's jobs until they end; slurm_state.py asks Slurm
"""
