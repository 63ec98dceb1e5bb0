"""The engines behind one interface: ours, built from the config (build.py), and PyTorch's own."""
