"""zeroexp trains one language model under every ZeRO implementation and shows what each costs."""

__version__ = "0.1.0"
