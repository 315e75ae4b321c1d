"""The rows of the comparison with JAX, one part for each face."""

from tests.peers import (
    rows_arrays,
    rows_elementwise,
    rows_image,
    rows_lax,
    rows_linalg,
    rows_programs,
    rows_signals,
    rows_special,
)

PARTS = (
    rows_elementwise,
    rows_arrays,
    rows_lax,
    rows_linalg,
    rows_signals,
    rows_special,
    rows_image,
    rows_programs,
)
ROWS = [row for part in PARTS for row in part.ROWS]
