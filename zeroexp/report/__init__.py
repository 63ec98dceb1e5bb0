"""What a person sees of runs: live progress, the final table, its picture, and the verdict on the loss curves."""
