"""zeroexp: train one language model under every ZeRO implementation and see what each costs."""

__version__ = "0.1.0"
