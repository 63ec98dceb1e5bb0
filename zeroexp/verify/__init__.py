"""Whether a training loop computes what one process would: `zeroexp verify FILE:FUNCTION`.

For each world size, ranks run the loop for a few steps, each with its own batches, and an observer writes down what
they hold, and sends nothing (`observe.py`, `local_elements.py`, `ranks.py`). One process then takes each step apart:

    what                        is compared with
    weights at the start        those of the plain model
    gradients before clipping   plain backward from the weights that the loop had, over all ranks' batches
    gradients at the optimizer  the loop's own, clipped
    weights after the step      the plain optimizer's, from the loop's own weights and gradients

Each begins from what the loop itself had, so that rounding does not grow from step to step, and the first line that
differs is where the mistake is, not where it shows (`compare_steps.py`). How far a right loop may be off is measured
beside what it should have (`rounding_oracle.py`), where other ranks are equals of this one (`equal_ranks.py`). What the
difference looks like is read from the gradients of single microbatches: those which a loop has are a sum of them, and
the factor of each tells a scale from a missing sum (`explain_difference.py`).
"""

from zeroexp.verify.loop_to_verify import Loop as Loop

__all__ = ["Loop"]
