"""What would silently train another model is refused here; nothing in this folder changes what is computed.

A student may skip it: it observes the engine (zero/observer.py), and without it code that does nothing wrong trains the
same model.

refusals.py             the observer: each event of the engine goes to the parts below that hear it
engine_arguments.py     what an engine is built with: modules, blocks, parameter groups, options
changed_parameters.py   parameters that were replaced, moved, thawed or written behind the engine
call_order.py           the order of microbatch, step and zero_grad
kept_views.py           views of gathered parameters that outlive them
parameter_guards.py     parameters whose values or gradients are not there (tensor_functions.py: which uses need them)
piece_guards.py         the optimizer's own tensors, where somebody else writes them or asks for their gradients
method_guards.py        methods of model and optimizer that would go past the engine
replicas_differ.py      replicas whose weights drift apart, and ranks whose learning rates differ
"""
