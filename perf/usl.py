"""The Universal Scalability Law, fitted by least squares: X(n) = rate n / (1 + contention (n - 1) +
coherency n (n - 1)).

`rate` is the throughput at n = 1, `contention` the part of the work that waits for a shared resource,
`coherency` the cost for each pair to stay consistent. n / X(n) is linear in 1 / rate, contention
/ rate and coherency / rate, so that no iteration and no starting point is needed; errors are
relative to the measured rates. Neither coefficient may be negative: of the four fits with none, one
or both of them left out, the best valid one is used. (N. Gunther, Guerrilla Capacity Planning, 2007.)

Intervals are bootstrapped: the repetitions of each n are drawn again, with replacement, and fitted.
They show how far chance could have moved the fit, not whether the law holds beyond the largest n.
With two different n, coherency cannot be separated from contention and is assumed to be 0; with one n,
both are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy

RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """`identified`: how many of the three parameters the data can identify. `error`: root mean square of
    the relative errors.
    """

    rate: float
    contention: float
    coherency: float
    identified: int
    error: float
    samples: tuple[tuple[float, float, float], ...] = ()

    def at(self, n: float) -> float:
        return law(n, self.rate, self.contention, self.coherency)

    def interval_at(self, n: float, confidence: float = CONFIDENCE) -> Interval:
        return _interval([law(n, *sample) for sample in self.samples] or [self.at(n)], confidence)

    def interval(self, name: str, confidence: float = CONFIDENCE) -> Interval:
        """The interval of `rate`, `contention` or `coherency`."""
        index = ("rate", "contention", "coherency").index(name)
        return _interval([sample[index] for sample in self.samples] or [getattr(self, name)], confidence)

    def pessimistic(self, n: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Contention and coherency of a pessimistic fit: the one with the lowest throughput at n within the
        confidence interval. Both are from one fit, because the upper ends of both together would be
        worse than any fit.
        """
        drawn = sorted(
            (law(n, 1.0, contention, coherency), contention, coherency)
            for _, contention, coherency in self.samples or [(self.rate, self.contention, self.coherency)]
        )
        return drawn[int((1 - confidence) / 2 * len(drawn))][1:]

    @property
    def peak(self) -> float:
        """The n with the largest X; infinite if X always grows with n."""
        return (
            math.sqrt((1 - self.contention) / self.coherency)
            if self.coherency > 0 and self.contention < 1
            else math.inf
        )


def law(n: float, rate: float, contention: float, coherency: float) -> float:
    return rate * n / (1 + contention * (n - 1) + coherency * n * (n - 1))


def _interval(values: Sequence[float], confidence: float) -> Interval:
    low, high = numpy.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def fit(points: Mapping[int, Sequence[float]], resamples: int = RESAMPLES, seed: int = 1) -> Fit:
    """`points`: by n, what was reached in each repetition (any rate above 0). Raises ValueError if there
    is nothing to fit.
    """
    measured = {n: numpy.asarray(values, float) for n, values in sorted(points.items())}
    if not measured or any(n < 1 or not len(values) or values.min() <= 0 for n, values in measured.items()):
        raise ValueError("each n from 1 on needs at least one rate above 0")
    identified = min(len(measured), 3)
    parameters, error = _solve(measured, identified)
    chance = numpy.random.default_rng(seed)
    drawn = ({n: chance.choice(values, len(values)) for n, values in measured.items()} for _ in range(resamples))
    return Fit(*parameters, identified, error, tuple(_solve(sample, identified)[0] for sample in drawn))


def _solve(measured: Mapping[int, numpy.ndarray], identified: int) -> tuple[tuple[float, float, float], float]:
    n = numpy.concatenate([numpy.full(len(values), float(count)) for count, values in measured.items()])
    x = numpy.concatenate(list(measured.values()))
    # rows scaled by x / n: the residual is the relative error of n / x
    columns = numpy.stack([numpy.ones_like(n), n - 1, n * (n - 1)], axis=1) * (x / n)[:, None]
    best: tuple[float, tuple[float, float, float]] | None = None
    for kept in itertools.chain.from_iterable(
        itertools.combinations(range(1, identified), size) for size in range(identified - 1, -1, -1)
    ):
        chosen = [0, *kept]
        solution = numpy.linalg.lstsq(columns[:, chosen], numpy.ones_like(n), rcond=None)[0]
        if solution.min() < 0 or solution[0] <= 0:
            continue
        found = numpy.zeros(3)
        found[chosen] = solution
        error = float(numpy.sqrt(numpy.mean((columns @ found - 1) ** 2)))
        if best is None or error < best[0] - 1e-15:
            best = error, (float(1 / found[0]), float(found[1] / found[0]), float(found[2] / found[0]))
    assert best is not None, "the fit without both coefficients is always valid"
    return best[1], best[0]
