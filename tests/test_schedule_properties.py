import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zendaya import PowerLaw, WaitK
from zendaya.evaluation.metrics.latency import schedule_lag, wait_k_at_lag

gammas = st.floats(0, 8, allow_nan=False)
lengths = st.integers(1, 400)


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
