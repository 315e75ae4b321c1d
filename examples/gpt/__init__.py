"""A GPT trained from pure functions: the main job of blufunc, and the program to read first.

model.py     the transformer, as functions over a pytree of parameters
data.py      where tokens come from, and which of them each step trains on
weights.py   safetensors files that are whole or not there at all
sample.py    text from a trained model
report.py    progress, the loss curve, the summary
sharded.py   what the axes of a mesh divide: parameters, batches, layers, heads, tokens, experts
devices.py   one device, or a mesh, and where arrays lie on it
train.py     the training step, and the loop around it
cli.py       the command line: python -m examples.gpt
"""
