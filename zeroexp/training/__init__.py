"""The training loop (loop.py), the loss on samples that no step trains on (validate.py), and how ranks agree to end."""
