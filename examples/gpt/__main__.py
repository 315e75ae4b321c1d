"""``python -m examples.gpt``: train, report, and print how to continue."""

import sys

from examples.gpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
