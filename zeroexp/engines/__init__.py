"""The engines behind one interface: ours, built from the config (build.py), and PyTorch's own.

Around a block of any of them, activation_offload.py keeps in host memory what it saves for backward.
"""
