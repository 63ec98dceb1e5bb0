"""Where ranks run: the job a cluster is given, the clusters, and the sweep that feeds them."""
