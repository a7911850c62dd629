"""Schedules: how many source tokens each decode step may read, exactly.

A schedule is any rule, fixed before decoding begins, that gives a non-decreasing integer horizon Ω_i for each step i
(Theorem 1 asks for nothing else). Symbols: F source tokens (`source`), N̂ predicted steps (`steps`), i the step from 1.
Every part of the library (training mask, offline decode, live runtime, latency metrics) takes its horizons from here.
"""

from __future__ import annotations

import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import numpy as np
import numpy.typing as npt

from zendaya.errors import ScheduleError

if TYPE_CHECKING:
    from typing_extensions import Self

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Ints = int | Sequence[int] | npt.NDArray[np.integer[Any]]
Rounding = Literal["ceil", "floor"]

MAX_COUNT = 2**53
"""Largest F, N or i taken: the largest range in which float64 holds every integer, which the fast path relies on."""
MAX_GAMMA = 10.0
"""Largest γ that the commands and a server accept: at 10 nearly all of a window is read in its last steps."""
MAX_CURVE = 10**8
"""Longest curve given at once: beyond it, ask for single steps with `at`."""


def _counts(value: Ints, name: str) -> IntArray:
    """An int64 array of whole numbers ≥ 1, or a ScheduleError that names the argument."""
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        raise ScheduleError(f"{name} must be whole numbers, at least 1, in a regular array: got {value!r}") from None
    if array.dtype.kind == "f" and np.all(np.abs(array) < MAX_COUNT) and np.all(array == np.floor(array)):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or array.size == 0:
        raise ScheduleError(f"{name} must be whole numbers, at least 1: got {value!r}")
    if array.min() < 1 or array.max() >= MAX_COUNT:
        bad = array.min() if array.min() < 1 else array.max()
        raise ScheduleError(f"{name} must be at least 1 and below 2**53: got {bad}")
    return array.astype(np.int64)


def _together(**named: Ints) -> list[IntArray]:
    """The named counts, checked and broadcast against each other."""
    arrays = [_counts(value, name) for name, value in named.items()]
    try:
        return [np.asarray(array) for array in np.broadcast_arrays(*arrays)]
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in zip(named, arrays, strict=True))
        raise ScheduleError(f"lengths must be single numbers or batches of one shape: got {shapes}") from None


def _number(value: object, name: str) -> float | Fraction:
    """A finite number ≥ 0, a Fraction kept as it is, or a ScheduleError that names it."""
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction | np.floating | np.integer):
        raise ScheduleError(f"{name} must be a number: got {value!r}")
    try:
        as_float = float(value)
    except OverflowError:
        as_float = math.inf
    if not 0 <= as_float < math.inf:
        meaning = " (0 is offline, 1 real time)" if name == "gamma" else ""
        raise ScheduleError(f"{name} must be finite and at least 0{meaning}: got {value}")
    return value if isinstance(value, Fraction) else as_float


def _decimal_fraction(value: float | Fraction | int) -> Fraction:
    """The number a user means by a float: the shortest decimal that prints it, so that 0.6 is 3/5 and not its binary neighbour."""
    return value if isinstance(value, Fraction) else Fraction(repr(float(value)) if isinstance(value, float) else int(value))


@dataclass(frozen=True)
class Schedule(ABC):
    """A rule `(step, source, steps) -> horizon`, fixed before decoding begins and non-decreasing in the step."""

    decides_while_reading: ClassVar[Literal[False]] = False
    """Whether it decides at each chunk of source and so has no horizons, as a `zendaya.runtime.policies.Policy` does."""
    learned: ClassVar[bool] = False
    """Whether the model's gamma head chooses a γ for each window."""
    trains_length: ClassVar[bool] = True
    """Whether a model trained under it has a length head."""
    sampled: ClassVar[Literal[False]] = False
    """Whether each training example draws its own schedule, as with a `zendaya.training.ScheduleSampler`."""
    form: ClassVar[str]
    """The printed form, for error messages."""

    @abstractmethod
    def at(self, step: Ints, *, source: Ints, steps: Ints) -> IntArray:
        """Ω at `step` (from 1) of a decode of predicted length `steps` over `source` tokens; the three broadcast."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The schedule whose printed form is `text`, in lower case and without spaces; None where it is another schedule's."""
        return None

    @overload
    def horizons(self, source: int, steps: int, *, num_steps: int | None = None) -> IntArray: ...
    @overload
    def horizons(self, source: Ints, steps: Ints, *, num_steps: int | None = None) -> IntArray: ...
    def horizons(self, source: Ints, steps: Ints, *, num_steps: int | None = None) -> IntArray:
        """Ω_1 … Ω_n, n = `num_steps` (default: the longest of `steps`); a batch of (F, N) pairs gives one row per pair.

        >>> PowerLaw(1).horizons(source=5, steps=3)
        array([2, 4, 5])
        >>> PowerLaw(1).horizons(source=[5, 4], steps=[3, 2])
        array([[2, 4, 5],
               [2, 4, 4]])
        """
        source_array, steps_array = _together(source=source, steps=steps)
        count = int(steps_array.max()) if num_steps is None else int(_counts(num_steps, "num_steps"))
        if count * source_array.size > MAX_CURVE:
            raise ScheduleError(f"a curve has at most {MAX_CURVE} horizons: got {count} steps for {source_array.size} sources")
        step = np.arange(1, count + 1)
        return self.at(step, source=source_array[..., None], steps=steps_array[..., None])

    def least_horizons(self, source: int, steps: int, *, num_steps: int | None = None) -> IntArray:
        """The horizon at which each step is first tried: below Ω where the schedule holds a step until it is heard."""
        return self.horizons(source, steps, num_steps=num_steps)

    @overload
    def exposure(self, source: int, steps: int) -> float: ...
    @overload
    def exposure(self, source: Ints, steps: Ints) -> float | FloatArray: ...
    def exposure(self, source: Ints, steps: Ints) -> float | FloatArray:
        """Ē = (1/N̂) Σ Ω_i/F (Eq. 2): the exact mean share of the source visible per step, one division at the end.

        >>> PowerLaw(1).exposure(source=5, steps=3)
        0.7333333333333333
        """
        source_array, steps_array = _together(source=source, steps=steps)
        means = [
            float(Fraction(sum(self.horizons(f, n).tolist()), f * n))
            for f, n in zip(source_array.ravel().tolist(), steps_array.ravel().tolist(), strict=True)
        ]
        return means[0] if source_array.ndim == 0 else np.array(means).reshape(source_array.shape)

    def buffer(self, window_tokens: int, max_steps: int) -> int:
        """B = Ω_1 at the longest decode allowed (Sec. 3.2): tokens of a window that may be read before N̂ is known; B ≤ Ω_1.

        >>> PowerLaw(0.3).buffer(window_tokens=100, max_steps=165)
        22
        >>> PowerLaw(1, head=50, hold=5).buffer(window_tokens=100, max_steps=165)  # what the first try of step 1 reads
        1
        """
        return int(self.least_horizons(window_tokens, max_steps, num_steps=1)[0])

    @property
    def hold(self) -> int:
        """m: a step is held while it attends most to one of the m newest source tokens; 0 holds nothing."""
        return 0

    @property
    def needs_length(self) -> bool:
        """Whether the horizons depend on the predicted length N̂."""
        return False

    @property
    def exposure_limit(self) -> float | None:
        """lim Ē over long sources and many steps, where it has a closed form that does not depend on F."""
        return None

    def exposure_limit_of(self, source: int) -> float | None:
        """lim Ē over many steps at F = `source`, where it has a closed form; a head start makes it depend on F."""
        return self.exposure_limit

    @property
    def gamma_or_none(self) -> float | None:
        """γ where the schedule is a point of the dial; the full context is γ = 0."""
        return None

    @property
    def k_or_none(self) -> int | None:
        """k where the schedule is wait-k."""
        return None

    @property
    def price(self) -> float | None:
        """Cost of a lag of the whole source for a learned schedule, in nats per step; None: the model's own price."""
        return None

    def for_run(self, rho: float | Fraction | None) -> Self:
        """The schedule for a checkpoint whose training corpus has the length ratio `rho`; None: not known."""
        return self

    def with_gamma(self, gamma: float) -> PowerLaw:
        """The point of the dial at another γ; a power law keeps its rounding and its head start."""
        return replace(self, gamma=gamma) if isinstance(self, PowerLaw) else PowerLaw(gamma)

    def draw(self, rng: np.random.Generator, *, source: int, stride: float) -> Schedule:
        """The schedule of one training example: always this one."""
        return self

    def choices(self, gammas: Sequence[float]) -> Sequence[Schedule]:
        """Schedules that a window may run under, when the model's gamma head chooses among `gammas`."""
        return (self,)


@dataclass(frozen=True)
class PowerLaw(Schedule):
    """Ω_i = min(F, h + ⌈F · (i/N̂)^γ⌉), the ratio clipped to 1 past N̂: the dial, from offline (γ=0) through real time (1) to starved (>1).

    Without a head start h it is Eq. 1. With γ = 1 it is wait-k at the instance's own stride F/N̂, within one token (method.md §8).

    The rounding is that of the real number, for every input: a float64 estimate with an error bound settles nearly all
    steps, and the few that lie within the bound of an integer are settled by exact arithmetic. A float γ stands for the
    decimal it prints as (0.3 is 3/10); a Fraction is taken as it is.

    >>> PowerLaw(gamma=2).horizons(source=100, steps=10)        # floats would say 2 at the first step
    array([  1,   4,   9,  16,  25,  36,  49,  64,  81, 100])
    >>> PowerLaw(gamma=1, head=2).horizons(source=10, steps=5)
    array([ 4,  6,  8, 10, 10])
    """

    form = "a number (gamma), gamma=1/3, gamma=0.3,floor, gamma=1,head=2, gamma=1,head=100,hold=25"

    gamma: float | Fraction
    rounding: Rounding = "ceil"
    head: int = 0
    """h, the source tokens of the head start: every step reads so many more, up to F."""
    hold: int = 0
    """m: a step is first tried without the head start, and held within it while it attends most to one of the m newest tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", _number(self.gamma, "gamma"))
        if self.rounding not in ("ceil", "floor"):
            raise ScheduleError(f"rounding must be 'ceil' or 'floor': got {self.rounding!r}")
        for name in ("head", "hold"):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < MAX_COUNT:
                raise ScheduleError(f"{name} must be a whole number of source tokens, at least 0: got {value!r}")
            object.__setattr__(self, name, int(value))
        if self.hold and not self.head:
            raise ScheduleError(f"a hold of {self.hold} tokens needs a head start to hold steps within: add head=, at least 1")

    def at(self, step: Ints, *, source: Ints, steps: Ints) -> IntArray:
        arrays = _together(step=step, source=source, steps=steps)
        powers = self._powers(*np.atleast_1d(*arrays)).reshape(arrays[0].shape)
        return np.minimum(arrays[1], self.head + powers) if self.head else powers

    def least_horizons(self, source: int, steps: int, *, num_steps: int | None = None) -> IntArray:
        return (replace(self, head=0, hold=0) if self.hold else self).horizons(source, steps, num_steps=num_steps)

    def _powers(self, step_array: IntArray, source_array: IntArray, steps_array: IntArray) -> IntArray:
        """⌈F · (i/N̂)^γ⌉ (or ⌊·⌋), without the head start."""
        step_array = np.minimum(step_array, steps_array)
        if self.gamma == 1 and int(source_array.max()) * int(steps_array.max()) < 2**62:  # whole numbers are exact as they are
            product = source_array * step_array
            return -(-product // steps_array) if self.rounding == "ceil" else product // steps_array
        # log near 0 and log1p near 1 keep the logarithm accurate to the last place for every ratio; the two bounds keep
        # a huge gamma finite: exp(-1e6) is 0 all the same.
        rest = (steps_array - step_array) / steps_array
        log_ratio = np.where(rest < 0.5, np.log1p(-np.minimum(rest, 0.5)), np.log(step_array / steps_array))
        log_share = np.maximum(min(float(self.gamma), 1e22) * log_ratio, -1e6)
        estimate = source_array * np.exp(log_share)
        # log, product, exp and the final product are each within a few units in the last place, and what the exponent
        # is off by is magnified by its size: eight units for each is a generous bound.
        margin = estimate * (1.0 - log_share) * 2.0**-49
        low, high = estimate - margin, estimate + margin
        if self.rounding == "ceil":
            horizons = np.clip(np.ceil(low), 1, source_array).astype(np.int64)
            settled = horizons == np.clip(np.ceil(high), 1, source_array)
        else:
            # F·r^γ < F for every r < 1 and γ > 0, however close its float comes.
            whole = (step_array == steps_array) | (self.gamma == 0)
            top = np.where(whole, source_array, source_array - 1)
            horizons = np.where(whole, source_array, np.clip(np.floor(low), 0, top)).astype(np.int64)
            settled = whole | (horizons == np.clip(np.floor(high), 0, top))
        exponent = _decimal_fraction(self.gamma)
        for index in zip(*np.nonzero(~settled), strict=True):
            ratio = Fraction(int(step_array[index]), int(steps_array[index]))
            horizons[index] = _round_exactly(int(source_array[index]), ratio, exponent, self.rounding, round(estimate[index]))
        return horizons

    @property
    def exposure_limit(self) -> float | None:
        """lim Ē = 1/(1+γ) (Eq. 3): the exposure of a long source read over many steps; None where a head start makes it depend on F."""
        return None if self.head and self.gamma else 1.0 / (1.0 + float(self.gamma))

    def exposure_limit_of(self, source: int) -> float:
        """lim Ē = η·x + x^{1+γ}/(1+γ) + 1 − x, where η = min(1, h/F) and x = (1−η)^{1/γ} is the share of the steps before Ω = F.

        >>> PowerLaw(gamma=1, head=5).exposure_limit_of(10)  # 0.5 · 0.5 + 0.5² / 2 + 0.5
        0.875
        """
        if (known := self.exposure_limit) is not None:
            return known
        gamma, head_share = float(self.gamma), min(1.0, self.head / int(_counts(source, "source")))
        share = (1.0 - head_share) ** (1.0 / gamma)
        return head_share * share + share * (1.0 - head_share) / (1.0 + gamma) + 1.0 - share  # x^{1+γ} = x·(1−η)

    @property
    def gamma_or_none(self) -> float:
        return float(self.gamma)

    @property
    def needs_length(self) -> bool:
        return self.gamma > 0

    @classmethod
    def for_budget(cls, first: int, source: int, steps: int, rounding: Rounding = "ceil", head: int = 0) -> PowerLaw:
        """γ* = ln(F/(B−h))/ln N̂ (Eq. 4): the dial at which the first step reads `first` source tokens, a head start of `head` included.

        >>> round(PowerLaw.for_budget(first=10, source=100, steps=165).gamma, 3)
        0.451
        """
        first, source, steps = (int(_counts(v, n)) for v, n in ((first, "first"), (source, "source"), (steps, "steps")))
        if first > source:
            raise ScheduleError(f"the first-token budget cannot exceed the source of {source} tokens: got {first}")
        head = cls(0.0, rounding, head).head
        if first <= head:
            raise ScheduleError(f"a head start of {head} tokens spends the first-token budget: expected one above {head}: got {first}")
        if steps == 1:
            if first == source:
                return cls(0.0, rounding, head)
            raise ScheduleError("a decode of one step reads the whole source at any gamma: a budget needs steps of at least 2")
        # In real numbers Ω₁ is `first` exactly; the float nearest to γ* may lie on the wrong side of it by its last digit.
        gamma = math.log(source / (first - head)) / math.log(steps)
        while rounding == "ceil" and cls(gamma, "ceil", head).at(1, source=source, steps=steps) > first:
            gamma = math.nextafter(gamma, math.inf)
        while rounding == "floor" and cls(gamma, "floor", head).at(1, source=source, steps=steps) < first:
            gamma = math.nextafter(gamma, 0.0)
        return cls(gamma, rounding, head)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        match = re.fullmatch(r"(?:gamma=)?([^=,]+)((?:,ceil|,floor|,head=[^=,]+|,hold=[^=,]+)*)", text)
        options = match[2].split(",")[1:] if match else []
        counts = {option[:4]: int(option[5:]) for option in options if "=" in option}
        rounding = [option for option in options if "=" not in option]
        if match is None or len(counts) + len(rounding) < len(options) or len(rounding) > 1:  # each at most once, in any order
            return None
        return cls(_parse_number(match[1]), "floor" if "floor" in rounding else "ceil", **counts)

    def __str__(self) -> str:
        gamma = str(self.gamma).removesuffix(".0") if self.head else str(self.gamma)  # gamma=1,head=2, but gamma=1.0
        counts = "".join(f",{name}={value}" for name, value in (("head", self.head), ("hold", self.hold)) if value)
        return f"gamma={gamma}" + ("" if self.rounding == "ceil" else ",floor") + counts


def _round_exactly(source: int, ratio: Fraction, exponent: Fraction, rounding: Rounding, nearest: int) -> int:
    """⌈F · ratio^γ⌉ (or ⌊·⌋) near the integer `nearest`: equality is decided algebraically, the rest by decimals of growing precision."""
    round_to = math.ceil if rounding == "ceil" else math.floor
    digits = 40
    while not _equals_power(Fraction(nearest, source), ratio, exponent):
        with localcontext() as context:
            context.prec = digits
            gamma = Decimal(exponent.numerator) / Decimal(exponent.denominator)
            log_step, log_steps = Decimal(ratio.numerator).ln(), Decimal(ratio.denominator).ln()
            value = source * (gamma * (log_step - log_steps)).exp()
            # Each operation is right to half a unit in the last digit; what the logarithms lose, gamma magnifies.
            slack = value * (gamma * (log_step + log_steps) + 10) * Decimal(10) ** (4 - digits)
            low, high, nearest = round_to(value - slack), round_to(value + slack), round(value)
        if low == high:
            return int(low)
        digits *= 2
    return nearest


def _equals_power(value: Fraction, base: Fraction, exponent: Fraction) -> bool:
    """Whether value == base^(p/q) exactly: both sides of a = t^q, c = t^p have whole solutions t (gcd(p, q) = 1)."""
    p, q = exponent.numerator, exponent.denominator
    return _same_root(base.numerator, value.numerator, p, q) and _same_root(base.denominator, value.denominator, p, q)


def _same_root(a: int, c: int, p: int, q: int) -> bool:
    """Whether a^p == c^q for whole a, c ≥ 1 and coprime p, q, without forming numbers larger than a and c."""
    if a == 1 or p == 0:
        return c == 1
    if q > a.bit_length() or p > c.bit_length():  # a whole root t ≥ 2 would need a ≥ 2^q and c ≥ 2^p
        return False
    root = round(a ** (1.0 / q))
    return any(t >= 2 and t**q == a and t**p == c for t in (root - 1, root, root + 1))


@dataclass(frozen=True)
class WaitK(Schedule):
    """g(i) = min(F, k + ⌈s·(i−1)⌉): wait-k with catch-up stride s, the source-to-target ratio ρ of the corpus (STACL's strong form).

    >>> WaitK(k=10, stride=2.75).horizons(source=55, steps=6)
    array([10, 13, 16, 19, 21, 24])
    """

    form = "wait-k=10,stride=2.75"
    trains_length = False  # its horizons do not depend on N̂ (Sec. 5.1)

    k: int
    stride: float | Fraction | None = None
    """Default: the training corpus's ρ, else 1."""

    def __post_init__(self) -> None:
        k: object = self.k
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 1 <= k < MAX_COUNT:
            raise ScheduleError(f"k must be a whole number, at least 1: got {k!r}")
        object.__setattr__(self, "k", int(k))
        if self.stride is not None:
            object.__setattr__(self, "stride", _number(self.stride, "stride"))

    def for_run(self, rho: float | Fraction | None) -> WaitK:
        return self if self.stride is not None else WaitK(self.k, 1.0 if rho is None else rho)

    @property
    def k_or_none(self) -> int:
        return self.k

    def at(self, step: Ints, *, source: Ints, steps: Ints) -> IntArray:
        step_array, source_array, _ = _together(step=step, source=source, steps=steps)
        stride = _decimal_fraction(1.0 if self.stride is None else self.stride)
        unique, inverse = np.unique(step_array, return_inverse=True)
        read = np.array([min(MAX_COUNT, self.k + math.ceil(stride * (int(i) - 1))) for i in unique], np.int64)
        return np.minimum(source_array, read[inverse].reshape(step_array.shape))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        match = re.fullmatch(r"wait-?k=([^=,]+)(?:,stride=([^=,]+))?", text)
        return cls(int(match[1]), _parse_number(match[2]) if match[2] else None) if match else None

    def __str__(self) -> str:
        return f"wait-k={self.k}" + ("" if self.stride is None else f",stride={self.stride}")


@dataclass(frozen=True)
class Full(Schedule):
    """g(i) = F: every step reads the whole source, the offline decoder.

    >>> Full().horizons(source=4, steps=3)
    array([4, 4, 4])
    """

    form = "full"

    def at(self, step: Ints, *, source: Ints, steps: Ints) -> IntArray:
        _, source_array, _ = _together(step=step, source=source, steps=steps)
        return source_array.copy()

    @property
    def exposure_limit(self) -> float:
        """Always 1."""
        return 1.0

    @property
    def gamma_or_none(self) -> float:
        return 0.0

    @classmethod
    def parse(cls, text: str) -> Self | None:
        return cls() if text == "full" else None

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True)
class Custom(Schedule):
    """Any fixed non-decreasing sequence of whole numbers, cut off at F; past its end the last horizon stays.

    >>> Custom([1, 1, 3, 9]).horizons(source=5, steps=6)
    array([1, 1, 3, 5, 5, 5])
    """

    form = "custom=1,2,5"

    sequence: tuple[int, ...]

    def __init__(self, sequence: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        values = list(sequence)
        if not values or any(isinstance(v, bool) or not isinstance(v, int | np.integer) for v in values):
            raise ScheduleError(f"a custom schedule is a list of whole numbers, one per step: got {values!r}")
        if values[0] < 0 or values[-1] >= MAX_COUNT:
            raise ScheduleError(f"a custom schedule's horizons must lie in 0 … 2**53: got {values[0] if values[0] < 0 else values[-1]}")
        for i, (before, after) in enumerate(itertools.pairwise(values), start=2):
            if after < before:
                raise ScheduleError(
                    f"a schedule must not decrease (later steps would inherit what they may not read): step {i} has {after} after {before}"
                )
        object.__setattr__(self, "sequence", tuple(int(v) for v in values))

    def at(self, step: Ints, *, source: Ints, steps: Ints) -> IntArray:
        step_array, source_array, _ = _together(step=step, source=source, steps=steps)
        index = np.minimum(step_array, len(self.sequence)) - 1
        return np.minimum(np.array(self.sequence, np.int64)[index], source_array)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        match = re.fullmatch(r"custom=([^=]+)", text)
        return cls([int(value) for value in match[1].split(",")]) if match else None

    def __str__(self) -> str:
        return "custom=" + ",".join(map(str, self.sequence))


@dataclass(frozen=True)
class Learned(Schedule):
    """A power law whose γ the model's gamma head chooses for each window, before its first step.

    It has no horizons of its own: a Session takes `PowerLaw(γ)`, window by window.

    >>> str(Learned()), str(Learned(price=0.5))
    ('learned', 'learned=0.5')
    """

    form = "learned"
    learned = True

    price: float | None = None
    """Cost of a lag of the whole source, in nats per step; None: the model's own price, solved for its budget."""

    def __post_init__(self) -> None:
        if self.price is not None:
            object.__setattr__(self, "price", float(_number(self.price, "price")))

    def at(self, step: Ints, *, source: Ints, steps: Ints) -> IntArray:
        raise ScheduleError("a learned schedule has no horizons before a window's gamma is chosen: open a session, or give a gamma")

    @property
    def needs_length(self) -> bool:
        return True

    def choices(self, gammas: Sequence[float]) -> Sequence[Schedule]:
        return [PowerLaw(gamma) for gamma in gammas]

    @classmethod
    def parse(cls, text: str) -> Self | None:
        match = re.fullmatch(r"learned(?:=([^=,]+))?", text)
        return cls(float(match[1]) if match[1] else None) if match else None

    def __str__(self) -> str:
        return "learned" if self.price is None else f"learned={self.price}"


def _parse_number(text: str) -> float | Fraction:
    return Fraction(text) if "/" in text else float(text)


def parse_schedule(text: str) -> Schedule:
    """The schedule of a printed form: `0.3`, `gamma=1,floor`, `gamma=1,head=2`, `wait-k=10,stride=2.75`, `full`, `custom=1,2,5`, `learned`.

    >>> parse_schedule("wait-k=10,stride=2.75")
    WaitK(k=10, stride=2.75)
    """
    compact = text.replace(" ", "").lower()
    kinds: tuple[type[Schedule], ...] = (Full, Learned, WaitK, Custom, PowerLaw)  # the power law last: it takes any bare word for a γ
    try:
        for kind in kinds:
            if (schedule := kind.parse(compact)) is not None:
                return schedule
    except ScheduleError:
        raise
    except (ValueError, ZeroDivisionError):
        pass
    raise ScheduleError(f"not a schedule: {text!r}; expected one of {', '.join(kind.form for kind in reversed(kinds))}")
