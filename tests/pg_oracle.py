# SPDX-License-Identifier: Apache-2.0
r"""Distribution function of the Polya-Gamma family, in NumPy and SciPy only.

An oracle for samplers, sharing no code with the package.  With :math:`\omega=X/4`,
:math:`h=b`, :math:`z=|c|/2`, the Laplace transform of :math:`X` is
:math:`M(s)=\{\cosh z/\cosh\sqrt{z^2+2s}\}^h`, and

.. math::
    F(x) = \frac{1}{2\pi i}\int e^{sx} M(s)\,\frac{ds}{s}

on any contour that passes to the right of the pole at 0; to its left the integral is
:math:`F(x)-1`.  The contour is a parabola whose focus is the branch point, and its
vertex minimises the integrand on the real line, so either tail keeps its relative
accuracy.  The exponent is written in the standardised value
:math:`\xi=(x-\mu)/\sigma`: as it stands it would lose all digits for large shapes and
tilts.
"""

import mpmath
import numpy as np
from scipy.interpolate import CubicSpline
from scipy.special import ndtr, ndtri

NODES = 256
DROP = 46.0


def unit_moments(z: float) -> tuple[float, float]:
    """Mean and variance of ``X`` at ``h = 1``."""
    q = z * z
    if z < 0.05:
        mean = 1 - q / 3 + 2 * q**2 / 15 - 17 * q**3 / 315 + 62 * q**4 / 2835
        slope = -1 / 3 + 4 * q / 15 - 51 * q**2 / 315 + 248 * q**3 / 2835
    else:
        t = np.tanh(z)
        # sech^2 without the cancellation of 1 - tanh^2.
        sech2 = 4 * np.exp(-2 * z) / np.square(1 + np.exp(-2 * z))
        mean = t / z
        slope = (sech2 - mean) / (2 * q)
    return float(mean), float(-2 * slope)


def moments(b: float, c: float) -> tuple[float, float]:
    """Mean and standard deviation of PG(b, c)."""
    mean, variance = unit_moments(abs(c) / 2)
    return b * mean / 4, float(np.sqrt(b * variance)) / 4


def laplace(t: float, b: float, c: float) -> float:
    """``E exp(-t omega)``, ``t >= 0``."""
    s = np.array([t / 4], complex)
    return float(np.exp(b * _log_unit_laplace(s, abs(c) / 2))[0].real)


def _log_unit_laplace(s: np.ndarray, z: float) -> np.ndarray:
    """``log M(s)`` at ``h = 1``, continuous off the branch cut."""
    r = np.sqrt(z * z + 2 * s)
    log_ratio = np.log1p(np.exp(-2 * z)) - np.log1p(np.exp(-2 * r))
    return log_ratio - 2 * s / (r + z)


def _exponent(s: np.ndarray, z: float) -> np.ndarray:
    """``log M(s) + s E X`` at ``h = 1``, which is quadratic in ``s`` at 0."""
    if z < 1:
        return _log_unit_laplace(s, z) + s * unit_moments(z)[0]
    r = np.sqrt(z * z + 2 * s)
    log_ratio = np.log1p(np.exp(-2 * z)) - np.log1p(np.exp(-2 * r))
    # E X = (1 - 2 / (1 + exp(2 z))) / z, and 1 / z - 2 / (r + z) in closed form.
    rest = 2 * np.exp(-2 * z) / (1 + np.exp(-2 * z)) / z
    return log_ratio + 2 * np.square(s) / (z * np.square(r + z)) - s * rest


def _vertex(xi: np.ndarray, h: float, z: float, upper: np.ndarray) -> np.ndarray:
    """Minimum over real ``s`` of the integrand's modulus, by golden section in the
    logarithm of the distance from the pole (or, above the mean, from both ends)."""
    branch = -(z * z + np.pi**2 / 4) / 2
    _, variance = unit_moments(z)
    sd = np.sqrt(h * variance)
    low = np.full_like(xi, -14.0)
    high = np.where(upper, 14.0, 14.0 + np.log(1 + 10 / h) * 4)

    def point(a: np.ndarray) -> np.ndarray:
        fraction = 1 / (1 + np.exp(a))
        return np.where(upper, branch * fraction, np.exp(a) / sd)

    def height(a: np.ndarray) -> np.ndarray:
        s = point(a)
        value = h * _exponent(s + 0j, z).real + s * sd * xi
        return value - np.log(np.abs(s))

    golden = (np.sqrt(5) - 1) / 2
    for _ in range(70):
        width = high - low
        left, right = high - golden * width, low + golden * width
        lower = height(left) < height(right)
        low, high = np.where(lower, low, left), np.where(lower, right, high)
    return point((low + high) / 2)


def tails(
    x: np.ndarray, b: float, c: float, nodes: int = NODES
) -> tuple[np.ndarray, np.ndarray]:
    """``F(x)`` and ``1 - F(x)`` of PG(b, c), ``x > 0``; the smaller one to a relative
    accuracy of about 1e-10."""
    h, z = float(b), abs(float(c)) / 2
    mean, variance = unit_moments(z)
    sd = np.sqrt(h * variance)
    scaled = 4 * np.asarray(x, float)
    xi = (scaled - h * mean) / sd
    upper = xi > 0
    branch = -(z * z + np.pi**2 / 4) / 2
    s0 = _vertex(xi, h, z, upper)
    delta = s0 - branch
    v = np.sqrt(DROP / (scaled * delta)) * ((np.arange(nodes) + 0.5) / nodes)[:, None]
    # s0 + delta ((1 + iv)^2 - 1), whose difference from s0 is small and exact.
    s = s0 + delta * (2j * v - np.square(v))
    exponent = h * _exponent(s, z) + s * sd * xi
    base = h * _exponent(s0 + 0j, z).real + s0 * sd * xi
    integrand = np.exp(exponent - base) / s * (1 + 1j * v)
    step = np.sqrt(DROP / (scaled * delta)) / nodes
    integral = 2 * delta / np.pi * np.exp(base) * (integrand.real.sum(0) * step)
    return np.where(upper, 1 + integral, integral), np.where(
        upper, -integral, 1 - integral
    )


class Reference:
    """PG(b, c) as a spline of its normal score in ``log x``.

    :param b: shape.
    :param c: tilt.
    :param reach: the score, in standard deviations, that the spline extends to.
    """

    def __init__(self, b: float, c: float, reach: float = 7.0) -> None:
        self.b, self.c = b, c
        self.mean, self.sd = moments(b, c)
        low, high = self._range(reach)
        grid = np.linspace(low, high, 400)
        below, above = tails(np.exp(grid), b, c)
        score = np.where(below < above, ndtri(below), -ndtri(above))
        self._spline = CubicSpline(grid, score)
        self._inverse = CubicSpline(score, grid)
        self._ends = grid[[0, -1]]

    def _range(self, reach: float) -> np.ndarray:
        """Logarithms of the values whose scores are close to ``-reach``, ``reach``."""
        h, z = self.b, abs(self.c) / 2
        mean, sd, far = 4 * self.mean, 4 * self.sd, 1.5 * reach
        # The points reached by an inverse Gaussian or a normal, and by an exponential.
        low = np.square(2 * h / (far + np.sqrt(far**2 + 4 * z * h)))
        if mean > far * sd:
            low = min(low, mean - far * sd)
        high = mean + far * sd + 0.5 * far**2 / ((z * z + np.pi**2 / 4) / 2)
        grid = np.linspace(np.log(low / 4), np.log(high / 4), 300)
        below, above = tails(np.exp(grid), self.b, self.c)
        tail = np.exp(-0.5 * reach**2) / reach / 2.5
        return grid[[np.sum(below < tail) - 1, len(grid) - np.sum(above < tail)]]

    def cdf(self, x: np.ndarray) -> np.ndarray:
        """The distribution function, to about 1e-8."""
        return ndtr(self._spline(np.clip(np.log(x), *self._ends)))

    def quantile(self, p: np.ndarray) -> np.ndarray:
        """Return the quantile, the inverse of the distribution function."""
        return np.exp(self._inverse(ndtri(p)))


def series_cdf(x: float, b: float, c: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """``F(x)`` and ``1 - F(x)`` from the alternating series of inverse-Gaussian
    distribution functions, in 80-digit arithmetic."""
    with mpmath.workdps(80):
        h, z, scaled = mpmath.mpf(b), abs(mpmath.mpf(c)) / 2, 4 * mpmath.mpf(x)
        root = mpmath.sqrt(2 * scaled)
        total, binomial, n = mpmath.mpf(0), mpmath.mpf(1), 0
        while True:
            a = 2 * n + h
            term = sum(
                mpmath.exp(sign * a * z) * mpmath.erfc((a + sign * z * scaled) / root)
                for sign in (-1, 1)
            )
            term *= binomial / 2 * (2 * mpmath.cosh(z)) ** h
            total += (-1) ** n * term
            if n > 3 and abs(term) < mpmath.mpf(10) ** -60:
                return total, 1 - total
            n += 1
            binomial *= (n + h - 1) / n
