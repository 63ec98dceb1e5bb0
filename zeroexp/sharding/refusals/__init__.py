"""What would train another model without a word is refused here; nothing in this folder changes what is computed.

A student may skip it: without these files, code that does nothing wrong trains the same model.

arguments.py     what an engine is built with: modules, blocks, parameter groups, options
calls.py         the order of microbatch, backward, step and zero_grad
changes.py       parameters that were replaced, moved, thawed or written behind the engine
kept_views.py    views of gathered parameters that outlive them
layouts.py       chunks of others' layouts that do not hold each parameter once
methods.py       methods of model and optimizer that would go past the engine
pieces.py        the optimizer's own tensors, where somebody else writes them or asks for their gradients
"""
