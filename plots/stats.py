"""The paper's statistics (appendix "Statistical Significance Calculations"), as functions of arrays.

Curves are [seeds, T] and scores [seeds]. A curve may begin with NaN, before a seed has a return:
such points have no statistic until every seed has one. An interval needs two seeds; with one it is
NaN.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy.stats

RESAMPLES = 2_000  # of an interval
TEST_RESAMPLES = 100_000  # of a difference test: p is known to 0.0014 where it is 0.05
TIE = 1e-6  # relative difference of what counts as equal: records are of float32
LEVEL = 0.05  # of significance


class Estimate(NamedTuple):
    """A statistic and its 95 % interval, scalars or [T]."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def half_width(self):
        """Returns the number that tables print after +-."""
        return (self.high - self.low) / 2


def iqm(x, axis=0):
    """Returns the mean of x along `axis` without the lowest and highest floor(n / 4) of n values."""
    return scipy.stats.trim_mean(x, 0.25, axis=axis)


def mean_of_iqms(*samples, axis=0):
    """Returns the mean of the IQMs of `samples`, one array of seeds for each environment."""
    return np.mean([iqm(x, axis) for x in samples], axis=0)


def bootstrap(statistic, *samples) -> Estimate:
    """Returns `statistic` of samples [seeds, ...] with its 95 % percentile interval.

    The seeds of several samples are redrawn within each, as strata.
    """
    flat = [x.reshape(len(x), -1) for x in samples]
    defined = np.all([np.isfinite(x).all(axis=0) for x in flat], axis=0)
    flat = [x[:, defined] for x in flat]
    estimate = np.full((3, defined.size), np.nan)
    if defined.any():
        estimate[0, defined] = statistic(*flat, axis=0)
        if min(len(x) for x in flat) > 1:
            resampled = scipy.stats.bootstrap(
                flat,
                statistic,
                axis=0,
                n_resamples=RESAMPLES,
                batch=100,
                vectorized=True,
                method="percentile",
                rng=np.random.default_rng(0),
            )
            estimate[1:, defined] = resampled.confidence_interval
    return Estimate(*estimate.reshape(3, *samples[0].shape[1:]))


def final_scores(timesteps, curve):
    """Returns each seed's mean over the last 10 % of training, [seeds]."""
    return np.nanmean(curve[:, is_final(timesteps)], axis=1, dtype=np.float64)


def is_final(timesteps):
    """Returns which points lie in the last 10 % of training, [T]."""
    return timesteps > 0.9 * timesteps[-1]


def difference_test(best, other) -> float:
    """Returns the share of resamples in which other's IQM matches or exceeds best's, each [seeds].

    Below 0.05, `other` is significantly worse; NaN where either has one seed, which shows nothing.
    """
    if min(len(best), len(other)) < 2:
        return np.nan
    tie = TIE * max(np.abs(best).max(), np.abs(other).max())
    ahead = resample_iqm(as_key(best), stream=0) - resample_iqm(as_key(other), stream=1)
    return float(np.mean(ahead <= tie))


def is_level(p: float) -> bool:
    """Returns whether the test with this p leaves open that the other is no worse.

    That counts also what only more resamples could settle: p within two standard errors of 0.05.
    """
    standard_error = np.sqrt(LEVEL * (1 - LEVEL) / TEST_RESAMPLES)
    return bool(p >= LEVEL - 2 * standard_error)  # False for NaN


def as_key(scores) -> tuple[float, ...]:
    """Returns scores [seeds] as what a cache can look up, in float64."""
    return tuple(np.asarray(scores, np.float64).tolist())


@lru_cache(maxsize=256)
def resample_iqm(scores: tuple[float, ...], stream: int):
    """Returns the IQM of each resample of these seeds, [TEST_RESAMPLES].

    A table of tests asks for the same methods over and over: 16 methods take 5 seconds, not 50.
    """
    rng = np.random.default_rng(stream)
    batches = [
        iqm(rng.choice(scores, size=(10_000, len(scores))), axis=1)
        for _ in range(TEST_RESAMPLES // 10_000)
    ]
    return np.concatenate(batches)


def rolling_mean(x, share=0.05):
    """Returns the mean of the last points of x [T] at each point, as many as `share` of all.

    NaN is skipped. For estimates and for the boundaries of their intervals.
    """
    width = max(1, round(share * len(x)))
    window = np.ones(width)
    seen = np.isfinite(x)
    count = np.convolve(seen, window)[: len(x)]
    total = np.convolve(np.where(seen, x, 0.0), window)[: len(x)]
    return np.divide(total, count, where=count > 0, out=np.full(len(x), np.nan))


def scale(curves) -> float:
    """Returns what an environment's IQMs are divided by: the highest of any method's curve."""
    return max(np.nanmax(iqm(curve)) for curve in curves)


def aggregate(curves, scales) -> Estimate:
    """Returns the mean over environments of normalised IQM curves [T], stratified by environment."""
    return bootstrap(mean_of_iqms, *(curve / s for curve, s in zip(curves, scales, strict=True)))


def time_to_threshold(timesteps, curve, threshold):
    """Returns each seed's first timestep at or above the threshold, [seeds]; NaN where none is."""
    reached = curve >= threshold
    return np.where(reached.any(axis=1), timesteps[reached.argmax(axis=1)], np.nan)


def mean_time(times) -> tuple[Estimate, int]:
    """Returns the mean over the seeds that reached the threshold, NaN where none did, and their number."""
    times = times[np.isfinite(times)]
    if len(times) == 0:
        return Estimate(np.nan, np.nan, np.nan), 0
    return bootstrap(np.mean, times), len(times)


def shared_threshold(scores) -> float:
    """Returns the threshold for all methods, whose final scores are [seeds] each.

    It lies 1 % below the best score of all runs: at 99 % of it where returns are positive; where
    they are negative, 99 % would be out of reach.
    """
    best = max(np.max(x) for x in scores)
    return best - 0.01 * abs(best)


def sample_efficiency(timesteps, curve, threshold) -> tuple[Estimate, int] | None:
    """Returns mean_time to a given threshold, or None (N/A) where the IQM never reaches it."""
    if not np.nanmax(iqm(curve)) >= threshold:
        return None
    return mean_time(time_to_threshold(timesteps, curve, threshold))


def speed_ratio(scorer_seconds, baseline_seconds) -> float:
    """Returns SCORER's wall-clock time as a multiple of the baseline's; below 1, SCORER is faster."""
    return np.mean(scorer_seconds) / np.mean(baseline_seconds)
