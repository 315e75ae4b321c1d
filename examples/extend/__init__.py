"""User-defined transforms, primitives and rules. Start with README.md."""
