"""Benchmarks: ratios to peers measured in the same run.

``suites`` are the commands, ``peers`` the programs of each library that they run, ``harness`` what these share,
``results`` the records, and ``report.py`` makes ``docs/benchmarks.md`` of them.
"""
