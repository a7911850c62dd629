import math
from fractions import Fraction

import numpy as np
import pytest

from zendaya import Custom, Full, PowerLaw, WaitK, ZendayaError
from zendaya.schedule import parse_schedule

SOURCES = np.arange(1, 201)


@pytest.mark.parametrize("gamma", [0, 1, 2, 3])
def test_whole_powers_equal_rational_arithmetic(gamma):
    for steps in range(1, 201):
        ceil = PowerLaw(gamma).horizons(SOURCES, steps)
        floor = PowerLaw(gamma, "floor").horizons(SOURCES, steps)
        exact, unit = SOURCES[:, None] * np.arange(1, steps + 1) ** gamma, steps**gamma  # Ω = exact / unit
        assert np.all((ceil - 1) * unit < exact)
        assert np.all(exact <= ceil * unit)
        assert np.all(floor * unit <= exact)
        assert np.all(exact < (floor + 1) * unit)


def test_square_root_equals_rational_arithmetic():
    for steps in range(1, 201):
        ceil = PowerLaw(0.5).horizons(SOURCES, steps)
        floor = PowerLaw(0.5, "floor").horizons(SOURCES, steps)
        exact = SOURCES[:, None] ** 2 * np.arange(1, steps + 1)  # Ω² · N
        assert np.all((ceil - 1) ** 2 * steps < exact)
        assert np.all(exact <= ceil**2 * steps)
        assert np.all(floor**2 * steps <= exact)
        assert np.all(exact < (floor + 1) ** 2 * steps)


def test_cases_that_floats_get_wrong():
    wrong = total = 0
    for gamma in (1, 2):
        for source in (55, 100, 135):
            for steps in range(1, 166):
                naive = [math.ceil(source * (i / steps) ** gamma) for i in range(1, steps + 1)]
                ours = PowerLaw(gamma).horizons(source, steps).tolist()
                assert ours == [math.ceil(source * Fraction(i, steps) ** gamma) for i in range(1, steps + 1)]
                wrong += sum(a != b for a, b in zip(naive, ours, strict=True))
                total += steps
    assert total == 82_170
    assert wrong == 140
    assert PowerLaw(2).at(1, source=100, steps=10) == 1


def test_a_float_gamma_means_the_decimal_it_prints_as():
    # 8 · (1/32)^(3/5) is exactly 1; the binary float nearest to 0.6 lies below 3/5 and would give 2.
    assert PowerLaw(0.6).at(1, source=8, steps=32) == 1
    assert PowerLaw(Fraction(3, 5)).at(1, source=8, steps=32) == 1
    assert PowerLaw(Fraction(0.6)).at(1, source=8, steps=32) == 2
    assert PowerLaw(0.2, "floor").at(1, source=100, steps=32) == 50


@pytest.mark.parametrize("gamma", [5e-324, 1e-20, 700.0, 1e308])
def test_extreme_gammas_stay_exact_and_quiet(gamma):
    ceil, floor = (PowerLaw(gamma, rounding).horizons(8, 32) for rounding in ("ceil", "floor"))
    if gamma < 1:
        assert ceil.tolist() == [8] * 32
        assert floor.tolist() == [7] * 31 + [8]
    else:
        assert ceil.tolist() == [1] * 31 + [8]
        assert floor.tolist() == [0] * 31 + [8]


def test_near_one_the_ratio_keeps_its_digits():
    # (1 − 2⁻⁴⁰)^(2⁴⁰) is nearly 1/e; a log of the rounded ratio would lose it.
    steps = 2**40
    share = float(PowerLaw(float(steps)).at(steps - 1, source=10**12, steps=steps)) / 10**12
    assert share == pytest.approx(math.exp(-1) * (1 - 2**-41), abs=2e-12)


def test_past_the_predicted_length_all_source_is_readable():
    assert PowerLaw(1).horizons(10, 4, num_steps=6).tolist() == [3, 5, 8, 10, 10, 10]


def test_a_batch_of_pairs_equals_one_pair_at_a_time():
    pairs = [(100, 165), (55, 20), (7, 3)]
    for schedule in (PowerLaw(0.3), PowerLaw(2, "floor"), WaitK(3, 0.61), Full(), Custom([1, 4, 4, 60])):
        batch = schedule.horizons([f for f, _ in pairs], [n for _, n in pairs])
        for row, (source, steps) in zip(batch, pairs, strict=True):
            assert row[:steps].tolist() == schedule.horizons(source, steps).tolist()
        exposures = schedule.exposure([f for f, _ in pairs], [n for _, n in pairs])
        assert exposures.tolist() == [schedule.exposure(f, n) for f, n in pairs]


def test_geometry_of_the_paper():
    assert PowerLaw.for_budget(first=10, source=100, steps=165).gamma == pytest.approx(0.451, abs=5e-4)
    assert PowerLaw.for_budget(first=30, source=100, steps=165).gamma == pytest.approx(0.236, abs=5e-4)
    assert PowerLaw.for_budget(first=10, source=100, steps=165).horizons(100, 165)[0] == 10
    assert PowerLaw(0.3).exposure_limit == 1 / 1.3
    assert PowerLaw(0.3).exposure(100, 165) == pytest.approx(0.77, abs=0.01)
    assert PowerLaw(0.3).buffer(window_tokens=100, max_steps=165) <= PowerLaw(0.3).horizons(100, 40)[0]


@pytest.mark.slow
def test_for_budget_is_exact_to_the_token():
    for source in range(2, 200, 7):
        for steps in range(2, 200, 9):
            for first in range(1, source + 1, max(1, source // 5)):
                for rounding in ("ceil", "floor"):
                    schedule = PowerLaw.for_budget(first, source, steps, rounding)
                    assert schedule.at(1, source=source, steps=steps) == first
                    assert float(schedule.gamma) == pytest.approx(math.log(source / first) / math.log(steps), abs=1e-12)


def test_wait_k_is_exact():
    assert WaitK(1, Fraction(100, 165)).at([34, 67, 100], source=100, steps=165).tolist() == [21, 41, 61]
    assert WaitK(k=10, stride=2.75).horizons(source=55, steps=20).tolist() == [min(55, 10 + math.ceil(2.75 * i)) for i in range(20)]
    # 0.1 · 10 is 1 in decimal; in floats 0.1 · 3 is 0.30000000000000004.
    assert WaitK(1, 0.1).at(31, source=100, steps=100) == 4
    assert WaitK(5, 1e300).horizons(9, 3).tolist() == [5, 9, 9]


@pytest.mark.parametrize(
    "make",
    [
        lambda: PowerLaw(-1),
        lambda: PowerLaw(math.nan),
        lambda: PowerLaw(math.inf),
        lambda: PowerLaw("0.3"),
        lambda: PowerLaw(True),
        lambda: PowerLaw(0.3, "round"),
        lambda: PowerLaw(0.3, head=-1),
        lambda: PowerLaw(0.3, head=1.5),
        lambda: PowerLaw(0.3, head=True),
        lambda: PowerLaw(0.3, head=2**53),
        lambda: PowerLaw.for_budget(first=3, source=10, steps=5, head=3),
        lambda: PowerLaw.for_budget(first=3, source=10, steps=5, head=-1),
        lambda: parse_schedule("gamma=1,head=x"),
        lambda: parse_schedule("gamma=1,head=-2"),
        lambda: parse_schedule("gamma=1,head=2,head=3"),
        lambda: parse_schedule("gamma=1,floor,ceil"),
        lambda: parse_schedule("wait-k=3,head=2"),
        lambda: parse_schedule("learned,head=2"),
        lambda: PowerLaw(0.3).horizons(0, 5),
        lambda: PowerLaw(0.3).horizons(5, 0),
        lambda: PowerLaw(0.3).horizons(2.5, 5),
        lambda: PowerLaw(0.3).horizons([5, 0], [1, 1]),
        lambda: PowerLaw(0.3).horizons([], []),
        lambda: PowerLaw(0.3).horizons(2**53, 5),
        lambda: PowerLaw.for_budget(first=11, source=10, steps=5),
        lambda: PowerLaw.for_budget(first=0, source=10, steps=5),
        lambda: PowerLaw.for_budget(first=5, source=10, steps=1),
        lambda: PowerLaw(10**400),
        lambda: PowerLaw(np.longdouble("1e4000")),
        lambda: PowerLaw(1).horizons([1, 2], [1, 2, 3]),
        lambda: PowerLaw(1).horizons([[1], [1, 2]], 3),
        lambda: PowerLaw(1).horizons(1e300, 5),
        lambda: PowerLaw(1).horizons(5, 5, num_steps=2.5),
        lambda: PowerLaw(1).horizons(5, 2**52),
        lambda: parse_schedule("1/0"),
        lambda: WaitK(0),
        lambda: WaitK(1.5),
        lambda: WaitK(3, -0.1),
        lambda: WaitK(3, math.nan),
        lambda: Custom([3, 2]),
        lambda: Custom([]),
        lambda: Custom([-1, 2]),
        lambda: Custom([1.5, 2]),
        lambda: parse_schedule("wait=3"),
        lambda: parse_schedule("gamma=x"),
        lambda: parse_schedule(""),
    ],
)
def test_bad_input_is_one_clear_line(make):
    with pytest.raises(ZendayaError) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) > 20


@pytest.mark.parametrize(
    "schedule",
    [PowerLaw(0.3), PowerLaw(1, "floor"), WaitK(10, 2.75), Full(), Custom([1, 2, 5]), PowerLaw(Fraction(1, 3)), WaitK(2, Fraction(20, 33))],
)
def test_a_schedule_is_parsed_from_its_printed_form(schedule):
    assert parse_schedule(str(schedule)) == schedule


def test_bare_numbers_are_gammas():
    assert parse_schedule("0.3") == PowerLaw(0.3)


def test_a_head_start_is_printed_in_one_order_and_read_in_any():
    assert str(PowerLaw(1, head=2)) == "gamma=1,head=2"
    assert str(PowerLaw(0.3, "floor", head=2)) == "gamma=0.3,floor,head=2"
    assert str(PowerLaw(Fraction(1, 3), head=2)) == "gamma=1/3,head=2"
    for text in ("gamma=1,head=2,floor", "gamma=1,floor,head=2", "1, head=2, floor"):
        assert parse_schedule(text) == PowerLaw(1, "floor", head=2)
    assert str(PowerLaw(1)) == "gamma=1.0"  # as results without a head start are named


def test_a_head_start_in_numbers():
    schedule = PowerLaw(1, head=2)
    assert schedule.horizons(10, 5).tolist() == [4, 6, 8, 10, 10]
    assert schedule.exposure(10, 5) == 0.76
    assert schedule.exposure_limit is None
    assert schedule.exposure_limit_of(10) == pytest.approx(0.2 * 0.8 + 0.8**2 / 2 + 0.2)
    assert schedule.exposure_limit_of(2) == 1.0
    assert PowerLaw(0.3).exposure_limit_of(10) == PowerLaw(0.3).exposure_limit == 1 / 1.3
    assert schedule.with_gamma(0.5) == PowerLaw(0.5, head=2)
    assert Full().with_gamma(0.5) == PowerLaw(0.5)
    with pytest.raises(ZendayaError, match="head start of 10 tokens"):
        PowerLaw.for_budget(first=10, source=100, steps=165, head=10)
