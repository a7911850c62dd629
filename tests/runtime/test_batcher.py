"""Many streams at once write what each writes alone, whenever they join, leave, pause, fail or turn their dial."""

import dataclasses

import pytest
import torch

from zendaya import Full, Model, PowerLaw, WaitK, ZendayaError
from zendaya.runtime.batcher import Batcher
from zendaya.runtime.engine import engine_for, missing
from zendaya.runtime.policies.local_agreement import LocalAgreement

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
SCHEDULES = [PowerLaw(0), PowerLaw(0.3), PowerLaw(1), PowerLaw(2, "floor"), WaitK(3, 0.7), Full(), LocalAgreement(8)]


def model(**changes):
    return Model.from_preset("tiny", seed=3, **changes)


def source(seed, count):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def pushes(seed):
    """How a stream arrives: pieces of its own sizes, two or three windows in all."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(30, 70, (1,), generator=generator))
    return source(seed, count).split(int(torch.randint(1, 20, (1,), generator=generator)))


def alone(made, engine, seed, **options):
    session = made.open(SCHEDULES[seed % len(SCHEDULES)], engine=engine, **options)
    events = [event for piece in pushes(seed) for event in session.push(piece)]
    return [*events, *session.finish()], session.cost


@pytest.mark.parametrize("changes", [{}, {"end_means_wait": True}, {"history": False}], ids=str)
@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("max_rows", [1, 7, 256])
def test_in_company_as_alone(max_rows, precision, changes):
    made = model(**changes)
    engine = engine_for(made, "native", precision=precision, threads=1)
    expected = [alone(made, engine, seed) for seed in range(14)]
    batcher = Batcher(engine, max_rows=max_rows)
    sessions, events = {}, {seed: [] for seed in range(14)}
    waiting = {seed: list(pushes(seed)) for seed in range(14)}
    for turn in range(200):  # a new one joins now and then, and each gets its next piece
        seeds = [seed for seed in range(min(14, 1 + turn // 2)) if seed not in sessions]
        for seed in seeds:
            sessions[seed] = batcher.add(made.open(SCHEDULES[seed % len(SCHEDULES)], engine=engine))
        for seed, session in sessions.items():
            if waiting[seed]:
                session.push(waiting[seed].pop(0))
                if not waiting[seed]:
                    session.finish()
        rounds = [batcher.round() for _ in range(3)]  # not enough to catch up: pushes meet sessions in the middle of a window
        for written in [written for now in rounds for written in now.outcomes]:
            events[next(seed for seed, session in sessions.items() if session is written.session)].append(written.event)
    for written in batcher.run():
        events[next(seed for seed, session in sessions.items() if session is written.session)].append(written.event)
    for seed, (texts, cost) in enumerate(expected):
        assert events[seed] == texts
        assert sessions[seed].cost == cost
    assert len({tuple(event.token for event in texts) for texts, _ in expected}) > 7


def test_a_round_is_bounded_and_none_is_left_out():
    made = model()
    engine = engine_for(made, "native", threads=1)
    batcher = Batcher(engine, max_rows=4)
    sessions = [batcher.add(made.open(PowerLaw(1), engine=engine, steps=20)) for _ in range(10)]
    for seed, session in enumerate(sessions):
        session.push(source(seed, 24))
    written = dict.fromkeys(map(id, sessions), 0)
    for _ in range(20):
        now = batcher.round()
        assert 0 < now.rows <= 4
        for each in now.outcomes:
            written[id(each.session)] += 1
        assert max(written.values()) - min(written.values()) <= 1
    assert min(written.values()) >= 7


def test_one_that_fails_leaves_and_the_others_go_on():
    made = model()
    engine = engine_for(made, "native", threads=1)
    good, bad = made.open(PowerLaw(0.3), engine=engine), made.open(PowerLaw(0.3), engine=engine)
    expected = [*made.open(PowerLaw(0.3), engine=engine, steps=None).push(source(1, 24))]
    batcher = Batcher(engine)
    batcher.add(good)
    batcher.add(bad)
    broken = source(2, 24)
    broken[15] = torch.nan
    good.push(source(1, 24))
    bad.push(broken)
    written = list(batcher.run())
    assert [each.event for each in written if each.session is good] == expected
    assert ["check the encoder" in str(each.error) for each in written if each.error] == [True]
    assert len(batcher) == 1


def test_a_call_that_finds_no_memory_loses_no_stream(monkeypatch):
    made = model()
    engine = engine_for(made, "native", threads=1)
    expected = [*made.open(PowerLaw(0.3), engine=engine).push(source(1, 24))]
    batcher = Batcher(engine)
    sessions = [batcher.add(made.open(PowerLaw(0.3), engine=engine)) for _ in range(3)]
    for session in sessions:
        session.push(source(1, 24))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "rows", lambda *_: (_ for _ in ()).throw(MemoryError))
        assert batcher.round().failed == []
        assert len(batcher) == 3
    written = list(batcher.run())
    assert [[each.event for each in written if each.session is session] for session in sessions] == [expected] * 3


def test_a_stream_without_memory_fails_alone(monkeypatch):
    made = model()
    for engine in (engine_for(made, "native", threads=1), engine_for(made, "torch")):
        expected = [*made.open(PowerLaw(0.3), engine=engine).push(source(1, 24))]
        batcher = Batcher(engine)
        sessions = [batcher.add(made.open(PowerLaw(0.3), engine=engine)) for _ in range(3)]
        for session in sessions:
            session.push(source(1, 24))
        rows, guilty = engine.rows, sessions[1].rows.cache

        def scarce(caches, ids, horizons, taps, rows=rows, guilty=guilty):
            if any(cache is guilty for cache in caches):
                raise MemoryError
            return rows(caches, ids, horizons, taps)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "rows", scarce)
            outcomes = list(batcher.run())
        assert [type(each.error) for each in outcomes if each.error] == [MemoryError]
        for session in (sessions[0], sessions[2]):
            assert [each.event for each in outcomes if each.session is session] == expected


def test_turns_are_marked_and_a_session_may_leave_any_time():
    made = model()
    engine = engine_for(made, "native", threads=1)

    def tell(session, draw):
        events = [*draw(session.push(source(1, 8)))]
        session.set_schedule(PowerLaw(0.2))
        return [*events, *draw(session.push(source(2, 16)))]

    expected = tell(made.open(PowerLaw(1), engine=engine, steps=12), list)
    batcher = Batcher(engine)
    session, other = (batcher.add(made.open(PowerLaw(1), engine=engine, steps=12)) for _ in range(2))
    other.push(source(5, 24))
    batcher.round()
    batcher.remove(other)
    got = tell(session, lambda _: [written.event for written in batcher.run()])
    assert got == expected
    assert any(event.schedule for event in got)


def test_a_round_tells_who_waits():
    made = model()
    engine = engine_for(made, "native", threads=1)
    batcher = Batcher(engine, max_rows=1)
    first, second, waiting = (batcher.add(made.open(PowerLaw(1), engine=engine, steps=12)) for _ in range(3))
    first.push(source(1, 24))
    second.push(source(2, 24))
    assert batcher.round().waiting == []  # the second was left out, and who comes after it was not asked
    assert list(batcher.run())
    assert set(batcher.round().waiting) == {first, second, waiting}


def test_what_cannot_be_is_refused():
    made = model()
    engine = engine_for(made, "native", threads=1)
    batcher = Batcher(engine)
    session = batcher.add(made.open(Full(), engine=engine))
    with pytest.raises(ZendayaError, match="joined already"):
        batcher.add(session)
    with pytest.raises(ZendayaError, match="own engine"):
        batcher.add(made.open(Full()))
    with pytest.raises(ZendayaError, match="has left"):
        batcher.remove(made.open(Full(), engine=engine))
    with pytest.raises(ZendayaError, match="at least 1 row"):
        Batcher(engine, max_rows=0)
    assert list(batcher.run()) == []
    assert dataclasses.astuple(session.cost)[:2] == (0, 0)
