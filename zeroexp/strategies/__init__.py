"""What the training loop can see of a parallel engine: `base.Strategy`, and one file per engine behind it."""
