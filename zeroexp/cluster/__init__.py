"""Ranks run on a cluster: the job that a cluster is given, the clusters, and the sweep that submits the jobs."""
