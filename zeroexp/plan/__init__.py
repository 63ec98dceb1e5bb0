"""A plan computes what a run will cost before it runs: `zeroexp plan` with the words of the run.

__main__.py, plan_points.py   the command, and the points of its line
form_of_config.py             the closed form of a configured point
closed_forms.py               bytes that rest with our engine, and that it sends
torch_closed_forms.py         the same for torch's engines
count_gathers.py              how often a step gathers each unit, by the real engine
machines.py                   the machines that a point is planned for
outcome.py, remedy.py         what all ranks hold and send; what to change where that does not fit
rehearse.py, storages.py      what the real model, engine and loop hold on tensors without memory
extrapolate_depth.py          a deep model, rehearsed at three small depths
absent_neighbours.py          peers of a CPU rank that do not exist
gloo_copies.py                what gloo copies
ddp_buckets.py                DistributedDataParallel's buckets, and what ZeroRedundancyOptimizer gives each rank
local_operations.py           the base of the modes that see every operation of a rehearsal
gradient_sums.py              which gradients autograd adds in place
kernel_scratch.py             what kernels of a CPU allocate beside their results
peak.py                       the peak of a planned point with activations, by a rehearsal
speed.py, timing.py           how fast a rank and its links are; the seconds of a rehearsed step
plan_table.py                 tables, JSON and CSV
fewest_ranks.py, explain_plan.py --fit: what fits at all; --explain: what makes a peak, and what would lower it
frontier.py                   points that no other beats in memory and time
beside_measured.py            the plan of a run beside its measurement
"""
