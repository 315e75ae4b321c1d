"""Benchmarks: ratios to peers measured in the same run.

``suites`` has the commands, ``peers`` the programs of each library that they run, ``harness`` their shared code,
``results`` the records; ``report.py`` generates ``docs/benchmarks.md`` from the records.
"""
