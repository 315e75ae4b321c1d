"""Language models with weights of Hugging Face: load, generate, finetune, save.

config.py         sizes and choices in which models differ
architectures.py  config.json to a configuration, and back
model.py          the transformers, as functions over a tree of parameters
quantized.py      matrices as int8 or NF4 codes
weights.py        folders of safetensors files to parameters, and back
placement.py      which devices of a mesh hold which part
layouts.py        loss and gradients on a mesh
tokenizer.py      text to tokens and back
generate.py       continue prompts, token by token
speculative.py    the same with a smaller model that drafts
finetune.py       train all parameters, or low-rank adapters
cli.py            the command line: python -m examples.llm
"""
