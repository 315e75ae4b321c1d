"""Functions into jaxprs (stage 1), and jaxprs into smaller ones (stage 4).

In: a function and abstract arguments, or a jaxpr. Out: a jaxpr. Recognizers and platform variants are chosen here. May
import all of ``core``.
"""
