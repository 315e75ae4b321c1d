"""``python -m tests.jax_names``: print the count of JAX's public names.

``--write`` also writes the figures and the missing names, with their reasons, into ``docs/jax.md``.
"""

import sys

from tests.jax_names import count

if __name__ == "__main__":
    found = count.counted()
    print(count.table(found))
    if "--write" in sys.argv:
        count.write(found)
