"""Moves of bytes between ranks. Nothing here knows more of ZeRO than how parameters are cut and which moves there are.

traits.py          what moves are asked to be, and what the engine needs to know of a transport: one row for each
base.py            what a move takes and returns, and what every transport can do
collectives.py     the only entry: it chooses a transport and counts what every move sends
native.py          the backend's own collectives (NCCL, fake), one launch for each move: collective_layout.py (what
                   they carry: arithmetic), packing.py (copies into and out of it)
direct.py          every rank hands each peer what that peer owns, and sums in rank order:
  point_to_point.py  carries tensors between hosts as gloo's messages
  shared_memory.py   lets ranks of one host read each other's memory: control_block.py (what they tell each other),
                     wake_up.py (how they wait), shared_memory_sizes.py (how much memory)
codec.py           around any of these: what a move carries is rounded to fewer bytes
replicas.py        sums once more, between groups of ranks, what each group has summed
secondary.py       a copy of parameters inside each node, from which later gathers of a step come (hpZ)
bus.py             between a rank's device and its host: what rests there (offload_file.py: in a file), moves to it
"""
