"""``python -m examples.llm generate`` and ``finetune``."""

import sys

from examples.llm.cli import main

if __name__ == "__main__":
    sys.exit(main())
