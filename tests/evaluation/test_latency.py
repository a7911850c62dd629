import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zendaya import Full, PowerLaw, WaitK, ZendayaError
from zendaya.evaluation.metrics.latency import (
    average_lagging,
    average_proportion,
    differentiable_average_lagging,
    length_adaptive_average_lagging,
    schedule_lag,
)


def slow_lagging(delays, source, pace):
    if delays[0] > source:
        return delays[0]
    total = 0.0
    for i, delay in enumerate(delays):
        total += delay - i * pace
        if delay >= source:
            break
    return total / (i + 1)


def slow_dal(delays, source):
    pace, before, total = source / len(delays), 0.0, 0.0
    for i, delay in enumerate(delays):
        before = delay if i == 0 else max(delay, before + pace)
        total += before - i * pace
    return total / len(delays)


def test_every_measure_equals_its_definition_on_random_traces():
    draw = random.Random(0)
    for _ in range(1000):
        source, target = draw.randint(1, 200), draw.randint(1, 60)
        delays = sorted(draw.randint(0, source + 3) for _ in range(draw.randint(1, 80)))
        lengths = {"source": source, "target": target}
        assert average_lagging(delays, **lengths) == pytest.approx(slow_lagging(delays, source, source / target), abs=1e-9)
        adaptive = slow_lagging(delays, source, source / max(len(delays), target))
        assert length_adaptive_average_lagging(delays, **lengths) == pytest.approx(adaptive, abs=1e-9)
        assert average_proportion(delays, **lengths) == pytest.approx(sum(delays) / source / target, abs=1e-9)
        assert differentiable_average_lagging(delays, **lengths) == pytest.approx(slow_dal(delays, source), abs=1e-9)


def test_hand_computed_cases():
    # Offline: the first step has read all 4, and AL stops there.
    assert average_lagging([4, 4], source=4, target=2) == 4
    # (1 − 0) and (3 − 2) and (4 − 4): τ is the third step.
    assert average_lagging([1, 3, 4, 4], source=4, target=2) == pytest.approx((1 + 1 + 0) / 3)
    assert average_proportion([1, 3, 4, 4], source=4, target=4) == 12 / 16
    assert differentiable_average_lagging([4, 4], source=4, target=2) == 4


def test_known_schedules():
    assert schedule_lag(Full(), source=100, steps=165) == 100
    assert schedule_lag(PowerLaw(0), source=100, steps=165) == 100
    assert schedule_lag(WaitK(3, 1), source=50, steps=50) == 3


MEASURES = [average_lagging, length_adaptive_average_lagging, average_proportion, differentiable_average_lagging]


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.__name__)
@pytest.mark.parametrize(
    ("delays", "source", "target", "message"),
    [
        ([], 3, 3, "one per target token"),
        ([float("nan")], 3, 3, "finite numbers"),
        (np.full((40, 2), np.inf), 3, 3, "finite numbers"),
        (["x"], 3, 3, "must be numbers"),
        (None, 3, 3, "finite numbers"),
        ([1], "F", 3, "must be numbers"),
        ([1], 0, 3, "above 0: got source=0"),
        ([1], 3, 0, "above 0"),
        ([1], float("nan"), 1, "above 0"),
        ([1], float("inf"), 1, "finite and above 0"),
    ],
)
def test_bad_input_is_one_line(measure, delays, source, target, message):
    with pytest.raises(ZendayaError, match=message) as caught:
        measure(delays, source=source, target=target)
    assert "\n" not in str(caught.value)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40).map(sorted), st.integers(1, 50), st.integers(1, 40), st.floats(0.1, 100))
def test_lag_grows_with_delays_and_has_the_unit_of_the_source(delays, source, target, unit):
    for measure in MEASURES:
        value = measure(delays, source=source, target=target)
        scaled = measure([delay * unit for delay in delays], source=source * unit, target=target)
        assert scaled == pytest.approx(value if measure is average_proportion else value * unit, abs=1e-6)
    dal, ap = (measure(delays, source=source, target=target) for measure in (differentiable_average_lagging, average_proportion))
    later = [delay + 1 for delay in delays]
    assert differentiable_average_lagging(later, source=source, target=target) == pytest.approx(dal + 1)
    assert average_proportion(later, source=source, target=target) > ap
    # Paced by the longer of what was written and what was wanted, LAAL is never below AL.
    lags = [measure(delays, source=source, target=target) for measure in (average_lagging, length_adaptive_average_lagging)]
    assert lags[1] >= lags[0] - 1e-9
