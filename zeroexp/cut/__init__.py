"""How parameters are cut, and what a stage does with the pieces: arithmetic below everything, without torch.

stage.py    where tensors rest, and which move joins two placements: the table of ZeRO
engine_rules.py  settings that the engine can not carry out in a stage, of the config and of a program alike
chunk.py    which rank owns which elements of parameters that lie side by side
owners.py   which rank owns which parameter, where parameters stay whole
codec_bytes.py  bytes of what travels encoded
layout.py   units are cut into chunks and padded: by parameter, by tensor, or as one buffer
check_chunks.py  what a layout of others cuts wrong
bucket.py   which gradients are reduced together
matrix_step.py    which rank steps a cut matrix, and what it is sent for that
moment_blocks.py  blocks of moments in 8 bits, and the kinds of parameters that have them
"""
