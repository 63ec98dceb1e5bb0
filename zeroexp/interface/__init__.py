"""What every engine shares, hand-written or native: the interface, and the state that it gives and takes.

strategy.py        the nine members that the training loop sees, and the types of what they return
canonical.py       optimizer state and tensors as ranges of flattened tensors, and back
held_pieces.py     what a rank holds of each parameter, and gives of it
reshard.py         what a rank holds, read from what any number of other ranks saved
saved_state.py     the state made of these, and its loading, before which check_state.py asks whether it can be loaded
values.py          the first weights of a model on meta, asked for in ranges
module_buffers.py  a module's buffers, equal on all ranks
python_values.py   optimizer state that is in no tensor
loss_scale.py      what a loss in float16 is multiplied by
quantized_moments.py  moments as they rest in bfloat16 or 8 bits
whole_matrices.py  how an optimizer asks for matrices of which a rank holds pieces
overlapping_memory.py  parameters that share memory with what a model keeps beside them
optimizer_trial.py the trial whether an optimizer updates each element by itself; which moments it keeps
fused_kernels.py   the trial whether torch's fused kernel of an optimizer is right for weights of a dtype, on a device
"""
