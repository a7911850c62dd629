import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zendaya import PowerLaw, WaitK
from zendaya.evaluation.metrics.latency import schedule_lag, wait_k_at_lag
from zendaya.schedule import parse_schedule

gammas = st.floats(0, 8, allow_nan=False)
lengths = st.integers(1, 400)
heads = st.integers(0, 60)
roundings = st.sampled_from(["ceil", "floor"])
rational_gammas = st.sampled_from([Fraction(p, q) for p in range(7) for q in (1, 2, 3, 4)])


@given(gammas, lengths, lengths)
def test_horizons_never_decrease_and_end_at_the_source(gamma, source, steps):
    horizons = PowerLaw(gamma).horizons(source, steps)
    assert horizons.dtype.kind == "i"
    assert np.all(np.diff(horizons) >= 0)
    assert horizons[0] >= 1
    assert horizons[-1] == source
    floor = PowerLaw(gamma, "floor").horizons(source, steps)
    assert np.all((horizons - floor >= 0) & (horizons - floor <= 1))
    assert floor[-1] == source


@given(st.one_of(gammas, st.floats(0, 1e6)), st.integers(1, 2**50), st.integers(1, 2**50), st.data())
def test_rounding_is_that_of_the_real_number(gamma, source, steps, data):
    step = data.draw(st.integers(1, steps))
    with localcontext() as context:
        context.prec = 120
        ratio = Decimal(step) / Decimal(steps)
        value = source * (Decimal(repr(gamma)) * ratio.ln()).exp()
        nearest = value.to_integral_value()
        if abs(value - nearest) < Decimal(10) ** -80:  # a whole number, to a hundred digits
            value = nearest
        expected = math.ceil(value)
    assert PowerLaw(gamma).at(step, source=source, steps=steps) == max(1, expected)
    head = data.draw(st.integers(1, 2**50))
    assert PowerLaw(gamma, head=head).at(step, source=source, steps=steps) == min(source, head + max(1, expected))


@given(gammas, lengths, lengths, st.data())
def test_one_step_equals_the_whole_curve(gamma, source, steps, data):
    step = data.draw(st.integers(1, steps + 5))
    schedule = PowerLaw(gamma)
    assert schedule.at(step, source=source, steps=steps) == schedule.horizons(source, steps, num_steps=steps + 5)[step - 1]


@given(gammas, lengths, lengths)
def test_exposure_is_the_exact_mean_and_nears_its_limit(gamma, source, steps):
    schedule = PowerLaw(gamma)
    exposure = schedule.exposure(source, steps)
    assert exposure == float(sum(Fraction(int(h), source) for h in schedule.horizons(source, steps)) / steps)
    riemann = math.fsum((i / steps) ** gamma for i in range(1, steps + 1)) / steps
    assert -1e-12 <= exposure - riemann < 1 / source + 1e-12  # the ceiling adds less than one token a step
    assert -1e-12 <= riemann - schedule.exposure_limit < 1 / steps + 1e-12  # an upper Riemann sum of a rising function


@given(gammas, gammas, lengths, lengths)
def test_turning_the_dial_up_never_reads_more(one, other, source, steps):
    low, high = sorted((one, other))
    assert np.all(PowerLaw(high).horizons(source, steps) <= PowerLaw(low).horizons(source, steps))


@given(gammas, lengths, lengths, lengths)
def test_the_buffer_never_exceeds_the_first_horizon(gamma, window, steps, more):
    schedule = PowerLaw(gamma)
    assert schedule.buffer(window, steps + more) <= schedule.horizons(window, steps)[0]


@given(st.integers(1, 120), st.floats(0, 10), lengths, lengths)
def test_wait_k_equals_its_formula(k, stride, source, steps):
    exact = Fraction(repr(stride))
    expected = [min(source, k + math.ceil(exact * (i - 1))) for i in range(1, steps + 1)]
    assert WaitK(k, stride).horizons(source, steps).tolist() == expected


@given(st.floats(-5, 60), st.integers(1, 60), st.integers(1, 60))
def test_wait_k_at_lag_finds_the_nearest(lag, source, steps):
    found = schedule_lag(wait_k_at_lag(lag, source=source, steps=steps), source=source, steps=steps)
    every = [schedule_lag(WaitK(k, Fraction(source, steps)), source=source, steps=steps) for k in range(1, source + 1)]
    assert abs(found - lag) <= min(abs(other - lag) for other in every) + 1e-9


# The head start.


def brute_force(gamma, head, rounding, source, steps, step):
    """Ω by rational arithmetic alone: n = ⌈F·r^(p/q)⌉ is the least n with n^q ≥ F^q·r^p."""
    power = source**gamma.denominator * Fraction(min(step, steps), steps) ** gamma.numerator
    ceil = next(n for n in range(source + 1) if n**gamma.denominator >= power)
    rounded = ceil if rounding == "ceil" or ceil**gamma.denominator == power else ceil - 1
    return min(source, head + rounded)


@given(rational_gammas, heads, roundings, st.integers(1, 40), st.integers(1, 40))
def test_a_head_start_equals_rational_arithmetic(gamma, head, rounding, source, steps):
    schedule = PowerLaw(gamma, rounding, head)
    curve = schedule.horizons(source, steps, num_steps=steps + 2).tolist()
    assert curve == [brute_force(gamma, head, rounding, source, steps, step) for step in range(1, steps + 3)]
    assert curve == [int(schedule.at(step, source=source, steps=steps)) for step in range(1, steps + 3)]
    assert schedule.horizons([source, source], [steps, steps], num_steps=steps + 2).tolist() == [curve, curve]


@given(gammas, heads, roundings, lengths, lengths)
def test_a_head_start_meets_theorem_1(gamma, head, rounding, source, steps):
    horizons = PowerLaw(gamma, rounding, head).horizons(source, steps)
    assert np.all(np.diff(horizons) >= 0)
    assert horizons[0] >= min(source, head + (rounding == "ceil"))
    assert horizons[-1] == source
    bare = PowerLaw(gamma, rounding).horizons(source, steps)
    assert horizons.tolist() == np.minimum(source, bare + head).tolist()


@given(heads, lengths, lengths)
def test_a_head_start_at_gamma_1_is_wait_k(head, source, steps):
    rival = WaitK(head + math.ceil(Fraction(source, steps)), Fraction(source, steps))
    gap = rival.horizons(source, steps) - PowerLaw(1, head=head).horizons(source, steps)
    assert set(gap.tolist()) <= {0, 1}


@given(heads, roundings, lengths, lengths)
def test_a_head_start_at_gamma_0_is_offline(head, rounding, source, steps):
    schedule = PowerLaw(0, rounding, head)
    assert schedule.horizons(source, steps).tolist() == [source] * steps
    assert schedule.exposure(source, steps) == schedule.exposure_limit == schedule.exposure_limit_of(source) == 1.0
    assert not schedule.needs_length


@given(gammas, heads, lengths, lengths)
def test_the_exposure_of_a_head_start_nears_its_limit(gamma, head, source, steps):
    schedule = PowerLaw(gamma, head=head)
    exposure = schedule.exposure(source, steps)
    assert exposure == float(sum(Fraction(int(h), source) for h in schedule.horizons(source, steps)) / steps)
    riemann = math.fsum(min(1.0, head / source + (i / steps) ** gamma) for i in range(1, steps + 1)) / steps
    assert -1e-12 <= exposure - riemann < 1 / source + 1e-12
    assert -1e-12 <= riemann - schedule.exposure_limit_of(source) < 1 / steps + 1e-12


@given(gammas, heads, lengths, lengths, lengths)
def test_the_buffer_of_a_head_start_is_its_closed_form(gamma, head, window, steps, more):
    schedule, bare = PowerLaw(gamma, head=head), PowerLaw(gamma)
    assert schedule.buffer(window, steps + more) == min(window, head + bare.buffer(window, steps + more))
    assert schedule.buffer(window, steps + more) <= schedule.horizons(window, steps)[0]


@given(st.integers(2, 300), st.integers(2, 300), roundings, st.data())
def test_a_budget_with_a_head_start_is_exact(source, steps, rounding, data):
    first = data.draw(st.integers(1, source))
    head = data.draw(st.integers(0, first - 1))
    schedule = PowerLaw.for_budget(first, source, steps, rounding, head=head)
    assert schedule.head == head
    assert schedule.at(1, source=source, steps=steps) == first
    assert float(schedule.gamma) == pytest.approx(math.log(source / (first - head)) / math.log(steps), abs=1e-12)


@given(st.one_of(gammas, rational_gammas), roundings, st.integers(0, 2**53 - 1))
def test_a_printed_head_start_is_read_back(gamma, rounding, head):
    schedule = PowerLaw(gamma, rounding, head)
    assert parse_schedule(str(schedule)) == schedule
