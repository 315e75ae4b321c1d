"""Public names of JAX's documented modules, and reasons for those missing."""
