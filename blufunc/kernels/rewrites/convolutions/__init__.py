"""Convolutions as kinds of libraries, matmuls and elementwise products."""
