"""What a few attempts say about a policy: pass@k, and intervals around means.

Pure numbers: it plays nothing and knows no task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["bootstrap", "interval", "pass_at_k", "wilson"]

_Z95 = 1.959963984540054  # the 97.5 % point of the normal distribution
_RESAMPLES = 2000
_AT_ONCE = 1 << 22  # indices drawn at a time, so that many tasks do not fill the memory


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """Chance that at least one of `k` attempts passes, drawn without replacement from `attempts`
    of which `passed` did: 1 - C(n-c, k) / C(n, k), the unbiased estimator of Chen et al. 2021
    ("Evaluating Large Language Models Trained on Code"), as a product that cannot overflow.

    Raises `ValueError` unless 1 <= k <= attempts and 0 <= passed <= attempts.
    """
    if not 1 <= k <= attempts or not 0 <= passed <= attempts:
        raise ValueError(f"pass@{k} of {passed} among {attempts} attempts means nothing")
    if attempts - passed < k:
        return 1.0
    failing = np.arange(attempts - passed + 1, attempts + 1, dtype=np.float64)  # (passed,) float64
    return 1.0 - float(np.prod(1.0 - k / failing))


def wilson(passed: int, attempts: int, z: float = _Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion, 95 % by default; it stays within 0 and 1 and has a
    width even when all or none passed. Raises `ValueError` without attempts."""
    if attempts < 1 or not 0 <= passed <= attempts:
        raise ValueError(f"no interval for {passed} of {attempts} attempts")
    share, extra = passed / attempts, z * z / attempts
    middle = (share + extra / 2) / (1 + extra)
    half = z / (1 + extra) * math.sqrt(share * (1 - share) / attempts + extra / attempts / 4)
    low = 0.0 if passed == 0 else max(0.0, middle - half)
    high = 1.0 if passed == attempts else min(1.0, middle + half)
    return low, high


def bootstrap(
    values: Sequence[float], *, seed: int, resamples: int = _RESAMPLES
) -> tuple[float, float]:
    """95 % percentile interval of the mean, by drawing as many values with replacement, again and
    again; the same for the same seed. Raises `ValueError` without values."""
    found = np.asarray(values, np.float64)  # (values,) float64
    if not len(found):
        raise ValueError("no interval for no values")
    random = np.random.default_rng(seed)
    means: list[np.ndarray] = []
    rows = max(1, _AT_ONCE // len(found))
    for start in range(0, resamples, rows):
        drawn = random.integers(0, len(found), (min(rows, resamples - start), len(found)))
        means.append(found[drawn].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def interval(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """95 % interval of a mean over tasks: Wilson's where each task gives 0 or 1, otherwise
    `bootstrap`, which would have no width when all are alike."""
    if set(values) <= {0.0, 1.0}:
        return wilson(int(sum(values)), len(values))
    return bootstrap(values, seed=seed)
