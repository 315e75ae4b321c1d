"""``autocast``: mixed precision as a transform of jaxprs.

In: a function and a low dtype. Out: a function. May import ``transforms.custom_rules`` and its imports.
"""
