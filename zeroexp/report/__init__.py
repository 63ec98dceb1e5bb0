"""People see runs as live progress, the final table, its picture, and the verdict on the loss curves."""
