"""Extending blufunc from outside: transforms, primitives and rules of one's own. Start with README.md."""
