import random

import pytest

from zendaya import Full, PowerLaw, WaitK, ZendayaError
from zendaya.metrics.latency import (
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


@pytest.mark.parametrize(
    ("delays", "source", "target"), [([], 3, 3), ([float("nan")], 3, 3), ([[1]], 3, 3), ([1], 0, 3), ([1], 3, 0), ([1], float("nan"), 1)]
)
def test_bad_input_is_refused(delays, source, target):
    with pytest.raises(ZendayaError):
        average_lagging(delays, source=source, target=target)
