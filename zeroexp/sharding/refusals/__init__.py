"""What would train another model without a word is refused here; nothing in this folder changes what is computed.

A student may skip it: it observes the engine (observer.py), and without it code that does nothing wrong trains the same
model.

engine_refusals.py   the observer: it hands each event of the engine to the files below
arguments.py         what an engine is built with: modules, blocks, parameter groups, options
calls.py             the order of microbatch, step and zero_grad
changes.py           parameters that were replaced, moved, thawed or written behind the engine
differing_replicas.py  replicas whose weights drift apart
kept_views.py        views of gathered parameters that outlive them
methods.py           methods of model and optimizer that would go past the engine
pieces.py            the optimizer's own tensors, where somebody else writes them or asks for their gradients
"""
