"""Functions of language models: rotary embeddings, and sampling of tokens."""
