"""The paper's statistics (appendix "Statistical Significance Calculations"), as plain functions of numpy arrays.

Curves are [seeds, T] and scores [seeds]. A curve may begin with NaN, before a seed has a return: such points have no
statistic until every seed has one. An interval needs two seeds; with one it is NaN.
"""

from typing import NamedTuple

import numpy as np
import scipy.stats

RESAMPLES = 2000


class Estimate(NamedTuple):
    """A statistic and its 95 % interval, scalars or [T]."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def half_width(self):
        """The number that tables print after +-."""
        return (self.high - self.low) / 2


def iqm(x, axis=0):
    """Interquartile mean: the lowest and highest floor(n / 4) of the n values along `axis` are left out."""
    return scipy.stats.trim_mean(x, 0.25, axis=axis)


def mean_of_iqms(*samples, axis=0):
    """Mean over environments of the IQMs of `samples`, one array of seeds for each environment."""
    return np.mean([iqm(x, axis) for x in samples], axis=0)


def resample(statistic, *samples):
    """scipy's percentile bootstrap of statistic(*samples, axis), seeds redrawn within each sample on its own."""
    return scipy.stats.bootstrap(samples, statistic, axis=0, n_resamples=RESAMPLES, batch=100, vectorized=True,
                                 method="percentile", rng=np.random.default_rng(0))


def bootstrap(statistic, *samples) -> Estimate:
    """`statistic` of samples [seeds, ...] with its 95 % percentile interval; several samples are strata."""
    flat = [x.reshape(len(x), -1) for x in samples]
    defined = np.all([np.isfinite(x).all(axis=0) for x in flat], axis=0)
    flat = [x[:, defined] for x in flat]
    estimate = np.full((3, defined.size), np.nan)
    if defined.any():
        estimate[0, defined] = statistic(*flat, axis=0)
        if min(map(len, flat)) > 1:
            estimate[1:, defined] = resample(statistic, *flat).confidence_interval
    return Estimate(*estimate.reshape(3, *samples[0].shape[1:]))


def final_scores(timesteps, curve):
    """Each seed's mean over the last 10 % of training, [seeds]."""
    return np.nanmean(curve[:, timesteps > 0.9 * timesteps[-1]], axis=1)


def difference_test(best, other) -> float:
    """Share of resamples in which the IQM of `other` [seeds] matches or exceeds that of `best` [seeds].

    Below 0.05, `other` is significantly worse; NaN where either has one seed, which shows nothing."""
    if min(len(best), len(other)) < 2:
        return np.nan
    differences = resample(lambda x, y, axis: iqm(x, axis) - iqm(y, axis), best, other).bootstrap_distribution
    return np.mean(differences <= 0)


def rolling_mean(x, width=50):
    """Mean of the last `width` points of x [T] at each point, NaN skipped; for estimates and interval boundaries."""
    window, seen = np.ones(width), np.isfinite(x)
    count = np.convolve(seen, window)[: len(x)]
    return np.divide(np.convolve(np.where(seen, x, 0.0), window)[: len(x)], count, where=count > 0,
                     out=np.full(len(x), np.nan))


def scale(curves) -> float:
    """What an environment's IQMs are divided by: the highest that any method's curve [seeds, T] reaches."""
    return max(np.nanmax(iqm(curve)) for curve in curves)


def aggregate(curves, scales) -> Estimate:
    """Mean over environments of normalised IQM curves [T], bootstrap stratified by environment."""
    return bootstrap(mean_of_iqms, *(curve / scale for curve, scale in zip(curves, scales, strict=True)))


def time_to_threshold(timesteps, curve, threshold):
    """The first timestep at which each seed's curve meets or exceeds the threshold, [seeds]; NaN where none does."""
    reached = curve >= threshold
    return np.where(reached.any(axis=1), timesteps[reached.argmax(axis=1)], np.nan)


def mean_time(times) -> tuple[Estimate, int]:
    """Mean over the seeds that reached the threshold, and their number; NaN where none did."""
    times = times[np.isfinite(times)]
    return bootstrap(np.mean, times) if len(times) else Estimate(np.nan, np.nan, np.nan), len(times)


def shared_threshold(scores) -> float:
    """First pass of the time to threshold: 1 % below the best final score of all runs of all methods, each [seeds].

    That is 99 % of it where returns are positive; where they are negative, 99 % would be out of reach."""
    best = max(np.max(x) for x in scores)
    return best - 0.01 * abs(best)


def sample_efficiency(timesteps, curve, threshold) -> tuple[Estimate, int] | None:
    """mean_time to a given threshold, or None (N/A) where the IQM of the curve never reaches it."""
    if not np.nanmax(iqm(curve)) >= threshold:
        return None
    return mean_time(time_to_threshold(timesteps, curve, threshold))


def speed_ratio(scorer_seconds, baseline_seconds) -> float:
    """Wall-clock time of SCORER's runs as a multiple of the baseline's; below 1, SCORER is faster."""
    return np.mean(scorer_seconds) / np.mean(baseline_seconds)
