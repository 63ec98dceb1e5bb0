"""What ranks and commands of tests need, imported once by the process that forks them, and never looked at again.

Each would spend seconds on it. No thread may start here: a fork would lose it.
"""

import gc
import os
from pathlib import Path

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.optim  # noqa: F401  (compiles what DDP with ZeroRedundancyOptimizer never calls)
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

import tests.checkpoint.saving  # noqa: F401
import zeroexp.__main__
import zeroexp.export
import zeroexp.run.rank  # noqa: F401
from zeroexp.measure import peak_flops

# The products that end a run take a rank a seventh of a second; tests/measure/test_peak_flops.py has them all.
peak_flops.SIZES["cpu"] = [64]

# But that of Arrow's allocator, which survives a fork: scikit-learn, where it is installed, brings it in.
names = [
    Path(f"/proc/self/task/{task}/comm").read_text(encoding="utf-8")
    for task in os.listdir("/proc/self/task")
]
assert len([name for name in names if "jemalloc" not in name]) == 1, names

# Else each collection of garbage in a rank looks at 300,000 objects (0.2 s), and the kernel copies their pages for it.
gc.collect()
gc.freeze()
