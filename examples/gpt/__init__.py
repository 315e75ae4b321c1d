"""A GPT trained from pure functions: blufunc's main example, to be read first.

model.py     the transformer, as functions over a pytree of parameters
data.py      sources of tokens, and the batch of each step
facts.py     what checkpoints say of a run: its settings and losses
sample.py    text from a trained model
report.py    progress, the loss curve, the summary
sharded.py   mesh axes: sharding of parameters, batches, layers, heads, tokens, experts
devices.py   one device, or a mesh, and the placement of arrays
train.py     the training step, and the loop around it
mesh_options.py  the options that say how a run is sharded
cli.py       the command line: python -m examples.gpt
"""
