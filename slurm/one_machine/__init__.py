"""The parts of `slurm/minicluster`: what it writes, the processes it starts and ends, its accounting."""
