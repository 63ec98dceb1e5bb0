"""What a person sees of runs: live progress, the table at the end, the verdict on the loss curves."""
