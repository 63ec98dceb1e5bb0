"""The training loop sees a parallel engine only as `base.Strategy`; each engine has its own file."""
