"""What a person sees of runs: live progress, the table at the end, its picture, the verdict on the loss curves."""
