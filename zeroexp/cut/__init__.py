"""How parameters are cut, and what a stage does with the pieces: arithmetic below everything, without torch.

stage.py    says where tensors rest and which move joins two placements: the table of ZeRO
chunk.py    says which rank owns which elements of parameters that lie side by side
owners.py   decides which rank owns which parameter, where parameters stay whole
layout.py   cuts units into chunks and pads them: by parameter, by tensor, or as one buffer
check_chunks.py  refuses what a layout of others cuts wrong
bucket.py   decides which gradients are reduced together
"""
