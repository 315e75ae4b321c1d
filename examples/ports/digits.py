"""scikit-learn's digits: 1797 images of 8 by 8 pixels, in ten classes."""

import numpy as np


def load(n_test=297):
    """Images in [0, 1] and labels, for training and testing.

    Returns:
      float32 (n, 64) and int32 (n,), for each.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.RandomState(0).permutation(len(data.target))
    images = (data.data[order] / 16.0).astype(np.float32)
    labels = data.target[order].astype(np.int32)
    return (images[n_test:], labels[n_test:]), (images[:n_test], labels[:n_test])
