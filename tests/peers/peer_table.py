"""The rows of the comparison with JAX, one part for each face."""

from tests.peers import rows_arrays, rows_elementwise, rows_linalg, rows_programs

ROWS = [*rows_elementwise.ROWS, *rows_arrays.ROWS, *rows_linalg.ROWS, *rows_programs.ROWS]
