"""The operations: primitives with all their rules, and strict functions that apply them."""
