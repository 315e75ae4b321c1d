"""Modules of JAX that few programs import. Under the face ``as_jax``."""
