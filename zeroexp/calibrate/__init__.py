"""What this machine does in a second, measured once, for the seconds that plans estimate.

__main__.py      the command, zeroexp calibrate
rates.py         products, memory, launches and moves, each by itself, on all ranks at once
step_factors.py  steps of small models as ranks train them, and as their rehearsals spend them; of both, what a second
                 of the rates takes in a real step
"""
