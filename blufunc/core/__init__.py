"""The intermediate representation and tracing. Knows nothing of backends or transforms."""
