"""One process of a run from its start to its end (rank.py), and its bucket size (bucket_size.py)."""
