import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zendaya import Model, PowerLaw, ZendayaError, replay
from zendaya.sources.arrivals import Bursty, Outages, Recorded, Steady, parse_link

LINKS = [Steady(), Bursty(1.5), Outages(0.1, 0.5), Outages(0.5, 3.0, seed=4), Outages(0.9, 0.2)]


@pytest.mark.parametrize("link", LINKS, ids=str)
@given(st.lists(st.floats(0, 3), max_size=60))
def test_a_link_keeps_order_and_brings_nothing_early(link, gaps):
    due_s = np.cumsum(gaps)
    arrivals_s = link.arrivals(due_s)
    assert (arrivals_s >= due_s).all()
    assert (np.diff(arrivals_s) >= 0).all()
    for count in (len(gaps) // 2, 1):  # what has arrived does not depend on what is still to come
        assert np.array_equal(link.arrivals(due_s[:count]), arrivals_s[:count])


@pytest.mark.parametrize(("late", "outage_s"), [(0.1, 2.0), (0.3, 8.0), (0.6, 0.5)])
def test_outages_delay_the_share_asked_for(late, outage_s):
    link, due_s = Outages(late, outage_s), np.arange(500_000) / 10
    assert link.share_late(due_s) == pytest.approx(late, rel=0.1)
    behind_s = link.arrivals(due_s) - due_s
    assert behind_s.max() <= outage_s
    assert np.mean(behind_s[behind_s > 0]) == pytest.approx(outage_s / 2, rel=0.2)


def test_a_recording_gives_back_what_happened(tmp_path):
    times_s = Outages(0.3, 2.0).arrivals(np.arange(40) / 4)
    Recorded(tuple(times_s)).save(tmp_path / "link.json")
    assert np.array_equal(parse_link(f"recorded={tmp_path / 'link.json'}").arrivals(np.arange(40) / 4), times_s)
    model, tokens = Model.from_preset("tiny"), np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)
    again = Recorded.load(tmp_path / "link.json").arrivals(np.arange(40) / 4)
    one, other = (list(replay(model.open(PowerLaw(1), patience_s=0.5), tokens, at_s)) for at_s in (times_s, again))
    assert one == other
    assert one != list(replay(model.open(PowerLaw(1), patience_s=0.5), tokens, np.arange(40) / 4))


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_a_link_is_what_it_prints(link):
    assert parse_link(str(link)) == link


@pytest.mark.parametrize(
    "text", ["", "late=0.3", "late=2,outage=4", "late=0.3,outage=0", "burst=-1", "burst=1e", "recorded=/no/such", "outage=4,late=0.3"]
)
def test_a_bad_link_is_one_clear_error(text):
    with pytest.raises(
        ZendayaError, match="cannot be read" if text.startswith("recorded") else "not a link|must|between|at least"
    ) as caught:
        parse_link(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{}", "[1, 0]", "[1, null]", "[NaN]", "oops"])
def test_a_bad_recording_of_arrivals_is_one_clear_error(tmp_path, content):
    (tmp_path / "link.json").write_text(content)
    with pytest.raises(ZendayaError, match=r"link\.json"):
        Recorded.load(tmp_path / "link.json")


def test_more_tokens_than_were_recorded():
    with pytest.raises(ZendayaError, match="cover 2 tokens: got 3"):
        Recorded((1.0, 2.0)).arrivals([0, 1, 2])
