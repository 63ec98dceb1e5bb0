"""A plan computes what a run will cost before it runs: `python -m zeroexp.plan` with the words of the run.

closed_forms.py               bytes that our engine sends and holds
torch_closed_forms.py         the same for torch's engines
transient.py                  what exists for a moment beside the model states
form_of_config.py             the closed form of a configured point
machines.py                   the machines that a point is planned for
outcome.py, remedy.py         what all ranks hold and send; what to change where that does not fit
rehearse.py, storages.py      what the real model, engine and loop hold on tensors without memory
depth.py, ddp_buckets.py      a deep model, rehearsed at three small depths; DistributedDataParallel's buckets
kernel_scratch.py             what kernels of a CPU allocate beside their results
peak.py                       the peak of a planned point with activations, by a rehearsal
speed.py, timing.py           how fast a rank and its links are; the seconds of a rehearsed step
scaling_page.py               the page docs/scaling.md: large models on two networks
points.py, table.py           the points of a command line; tables, JSON and CSV
"""
