"""Fewer points for a line chart, with the extremes of all of them."""

import numpy as np

BUCKETS = 500  # a chart is about as many pixels wide, or twice as many
PER_BUCKET = 5


def decimate(steps: np.ndarray, values: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """Returns the indices of the points to draw, at most PER_BUCKET for each of `buckets` equal ranges of steps.

    Of each range these are the first, the last, the smallest and the largest, which draw the same line where a
    range is a column of pixels: M4, U. Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation",
    PVLDB 7 (10), 2014. The first NaN of a range is kept as well, because a gap must not vanish. `steps`
    increase strictly; both arrays are (N,).
    """
    if len(steps) <= PER_BUCKET * buckets:
        return np.arange(len(steps))
    bucket = ((steps - steps[0]) * buckets // (steps[-1] - steps[0] + 1)).astype(int)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    number = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(bucket)))
    is_nan = np.isnan(values)
    low, high = np.where(is_nan, np.inf, values), np.where(is_nan, -np.inf, values)

    def first_of_each(mask: np.ndarray) -> np.ndarray:
        found = np.flatnonzero(mask)
        return found[np.unique(number[found], return_index=True)[1]]

    smallest = first_of_each(low == np.minimum.reduceat(low, starts)[number])
    largest = first_of_each(high == np.maximum.reduceat(high, starts)[number])
    ends = np.append(starts[1:], len(bucket)) - 1
    return np.unique(np.concatenate([starts, ends, smallest, largest, first_of_each(is_nan)]))
