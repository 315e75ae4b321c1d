"""Generated pages of the site: reference, gallery, charts, notebooks.

It stands on blufunc's public face, ``examples`` and ``benchmarks/results``; only MkDocs and the tests read it.
"""
