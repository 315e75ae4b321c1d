"""The demo with a preset small enough for tests.

Usage: ``python -m blufunc.parallel.launch -n 2 gpt_nano.py OPTIONS``.
"""

import sys

from examples.gpt import cli, model, train

model.PRESETS["nano"] = model.Config(layers=2, heads=2, width=16, context=16, vocab=256)
train.RECIPES["nano"] = {"steps": 12, "batch": 4, "lr": 1e-2}
train.QUICK, train.FULL = 4, 16  # windows of validation

if __name__ == "__main__":
    sys.exit(cli.main(["--preset", "nano", *sys.argv[1:]]))
