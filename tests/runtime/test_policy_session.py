"""Policies in a Session, against plain implementations on the decoder's masked path, and properties of every policy."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zendaya import Full, Model, PowerLaw, WaitK, ZendayaError
from zendaya.nn.config import Framing
from zendaya.runtime.options import Pace
from zendaya.runtime.policies import parse_policy
from zendaya.runtime.policies.alignatt import AlignAtt
from zendaya.runtime.policies.edatt import EDAtt
from zendaya.runtime.policies.local_agreement import LocalAgreement
from zendaya.runtime.replay import replay

WINDOW = 24
END = 2


def lively(seed, **changes):
    """A random model that writes a few words of a small vocabulary and sometimes ends."""
    framing = Framing(suppress=tuple(i for i in range(512) if i != END and not 10 <= i < 22))
    model = Model.from_preset("tiny", seed=seed, framing=framing, max_steps=16, **changes)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layers." in name and weight.ndim == 2:
                weight.mul_(4)
    return model


MODELS = [lively(seed) for seed in range(3)]
POLICIES = [
    LocalAgreement(1),
    LocalAgreement(5),
    AlignAtt(1),
    AlignAtt(3, chunk=4),
    AlignAtt(2, heads=((0, 1), (1, 0))),
    EDAtt(0.3, last=3),
]
POLICIES += [EDAtt(0.6, last=5, chunk=7, layer=0)]


def stream(count, seed=0):
    return 2 * torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def decode(session, tokens, pieces=()):
    events, at = [], 0
    for piece in [*pieces, len(tokens)]:
        events += session.push(tokens[at : at + piece])
        at = min(len(tokens), at + piece)
    return [*events, *session.finish()]


class Masked:
    """The decoder teacher-forced over a whole prefix, each row reading all the source given."""

    def __init__(self, model, source_FE):
        self.model, self.source_FE = model, source_FE
        self.rows = 0

    def next(self, text, arrived, heads=()):
        """The token after a text, and how much its row attends to each source token."""
        decoder, framing = self.model.decoder, self.model.config.framing
        ids = torch.tensor([[*framing.prompt, *text]])
        asked = []
        hooks = [layer.cross_attention.query.register_forward_hook(lambda _, __, q: asked.append(q[0, -1])) for layer in decoder.layers]
        with torch.inference_mode():
            logits_V = decoder(ids, self.source_FE[None, :arrived], torch.full(ids.shape, arrived))[0, -1].clone()
            memory_FD = decoder._embed_source(self.source_FE[None, :arrived])[0][0]
            logits_V[list(framing.suppress)] = -torch.inf
            weights = []
            for layer, head in heads:
                attention = decoder.layers[layer].cross_attention
                size = self.model.config.decoder.head_dim
                q, k = asked[layer].view(-1, size)[head], attention.key(memory_FD).view(arrived, -1, size)[:, head]
                weights.append((k @ q / math.sqrt(size)).softmax(0))
        for hook in hooks:
            hook.remove()
        return int(logits_V.argmax()), torch.stack(weights).mean(0).numpy() if weights else None

    def rest(self, text, arrived):
        """The hypothesis after a text."""
        tokens = []
        while len(text) + len(tokens) < self.model.config.max_steps:
            tokens.append(self.next([*text, *tokens], arrived)[0])
            if tokens[-1] == END:
                break
        return tokens


def moments(policy, count):
    """Source arrived each time a policy is asked, and whether it is complete."""
    asked = [*range(policy.chunk or 1, count + 1, policy.chunk or 1)]
    if count == WINDOW:
        return [(n, n == WINDOW) for n in asked] if asked and asked[-1] == WINDOW else [*((n, False) for n in asked), (WINDOW, True)]
    return [*((n, False) for n in asked), (count, True)]


def expected_agreement(policy, model, source_FE):
    masked, text, log, before, rows, revised, read = Masked(model, source_FE), [], [], [], 0, 0, 0
    for arrived, complete in moments(policy, len(source_FE)):
        hypothesis = before
        if arrived > read:
            hypothesis, read = masked.rest(text, arrived), arrived
            rows += len(model.config.framing.prompt) + len(text) + len(hypothesis) - 1
            said = [t for t in before if t != END]
            shared = 0
            while shared < min(len(said), len(hypothesis)) and said[shared] == hypothesis[shared]:
                shared += 1
            revised += len(said) - shared
        else:
            shared = 0
        count = len(hypothesis) if complete else shared
        text += hypothesis[:count]
        log += [(token, arrived) for token in hypothesis[:count]]
        before = hypothesis[count:]
        if len(text) == model.config.max_steps or END in text:
            break
    return log, rows, revised


def expected_looking(policy, model, source_FE):
    masked, text, log, rows, revised, held, read, fresh = Masked(model, source_FE), [], [], 0, 0, None, 0, False
    layers = model.config.decoder.layers
    layer = policy.layer if policy.layer is not None else math.ceil(2 * layers / 3) - 1
    heads = policy.heads or [(layer, head) for head in range(model.config.decoder.heads)]
    for arrived, complete in moments(policy, len(source_FE)):
        while True:
            token, attention = masked.next(text, arrived, heads)
            rows += len(model.config.framing.prompt) + len(text) if arrived > read else 1 if fresh else 0
            read, fresh = arrived, False
            revised += held is not None and held != token
            held = None if token == END else token
            late = (
                attention.argmax() >= arrived - policy.last
                if isinstance(policy, AlignAtt)
                else attention[-policy.last :].sum() >= policy.share
            )
            if not complete and (token == END or late or arrived <= policy.last):
                break
            text.append(token)
            log.append((token, arrived))
            held, fresh = None, True
            if token == END or len(text) == model.config.max_steps:
                return log, rows, revised
    return log, rows, revised


@pytest.mark.parametrize("model", MODELS, ids=range(3))
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("count", [1, 17, WINDOW])
def test_events_and_cost_equal_a_plain_implementation(policy, model, count):
    source_FE = stream(count, seed=count)
    session = model.open(policy)
    events = decode(session, source_FE)
    expected = expected_agreement if isinstance(policy, LocalAgreement) else expected_looking
    log, rows, revised = expected(policy, model, source_FE)
    assert [(e.token, e.effective_horizon) for e in events] == log
    history = 1 + sum(e.token != END for e in events)  # the text as the next window's history
    assert (session.cost.rows - history, session.cost.revised) == (rows, revised)


@settings(max_examples=25)
@given(st.sampled_from(POLICIES), st.integers(0, 2), st.integers(1, 60), st.lists(st.integers(0, 20), max_size=12))
def test_any_chunking_gives_the_same_events(policy, seed, count, pieces):
    session, other = MODELS[seed].open(policy), MODELS[seed].open(policy)
    assert decode(session, stream(count), pieces) == decode(other, stream(count))
    assert session.cost == other.cost


@settings(max_examples=25)
@given(st.sampled_from(POLICIES), st.integers(0, 2), st.integers(1, 60), st.lists(st.integers(1, 59), max_size=4))
def test_every_window_is_written_once_from_arrived_source(policy, seed, count, cuts):
    events = list(replay(MODELS[seed].open(policy), stream(count), np.arange(1.0, count + 1), cuts=cuts))
    windows = max(e.window_index for e in events) + 1
    assert [e.window_index for e in events if e.last] == list(range(windows))
    for window in range(windows):
        mine = [e for e in events if e.window_index == window]
        assert [e.step for e in mine] == list(range(1, len(mine) + 1))
        horizons = [e.effective_horizon for e in mine]
        assert horizons == sorted(horizons)
        assert 1 <= horizons[0] <= horizons[-1] <= WINDOW
        assert mine[-1].token == END or len(mine) == 16
        assert END not in [e.token for e in mine[:-1]]
    for event in events:
        assert event.window_start + event.effective_horizon <= event.arrival_s
        assert event.horizon == event.effective_horizon


@settings(max_examples=25)
@given(st.sampled_from(POLICIES), st.integers(0, 2), st.integers(2, 60), st.data())
def test_nothing_depends_on_future_source(policy, seed, count, data):
    moment = data.draw(st.integers(1, count - 1))
    kept = stream(count)[:moment]
    futures = [stream(count)[moment:], 100 * stream(9, seed=1), torch.full((7, 16), torch.nan), stream(0)]
    texts = []
    for future in futures:
        session, events = MODELS[seed].open(policy), []
        for token in kept:
            events += session.push(token[None])
        texts.append(events)
        try:
            later = [*events, *session.push(future), *session.finish()]
        except ZendayaError:  # a NaN, once it is read
            continue
        assert later[: len(events)] == events
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("policy", [LocalAgreement(WINDOW), AlignAtt(WINDOW), EDAtt(0.01, last=WINDOW), AlignAtt(WINDOW, chunk=5)], ids=str)
@pytest.mark.parametrize("count", [1, 11, 24, 50])
def test_waiting_for_the_whole_window_is_full_context(policy, count):
    for model in MODELS:
        full = decode(model.open(Full()), stream(count))
        assert [(e.window_index, e.token, e.effective_horizon) for e in decode(model.open(policy), stream(count))] == [
            (e.window_index, e.token, e.effective_horizon) for e in full
        ]


def test_an_early_end_waits_for_the_complete_window():
    model = lively(0, end_means_wait=True)
    for policy in POLICIES:
        events = decode(model.open(policy), stream(20))
        assert all(e.effective_horizon == 20 for e in events if e.token == END)


def test_cost_of_a_schedule():
    for model in MODELS:
        session = model.open(WaitK(3, 0.7))
        events = decode(session, stream(WINDOW))
        history = 1 + sum(e.token != END for e in events)
        prompt = len(model.config.framing.prompt)
        assert dataclasses.astuple(session.cost) == (prompt + len(events) - 1 + history, len(events) + 1, 0, 0)


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda: MODELS[0].open(AlignAtt(1, layer=2)), "layers 0 … 1"),
        (lambda: MODELS[0].open(EDAtt(0.5, heads=((0, 2),))), "heads 0 … 1"),
        (lambda: MODELS[0].open(LocalAgreement(3), patience_s=2.0), "patience"),
        (lambda: MODELS[0].open(AlignAtt(1)).set_schedule(PowerLaw(1)), "new session"),
        (lambda: MODELS[0].open(PowerLaw(1)).set_schedule(AlignAtt(1)), "new session"),
    ],
)
def test_misuse_is_one_clear_line(do, says):
    with pytest.raises(ZendayaError, match=says) as caught:
        do()
    assert "\n" not in str(caught.value)


def test_a_models_alignment_heads_are_the_default():
    model = lively(1)
    model.alignment_heads = ((0, 1),)
    named = decode(MODELS[1].open(AlignAtt(3, heads=((0, 1),))), stream(40))
    assert decode(model.open(AlignAtt(3)), stream(40)) == named != decode(MODELS[1].open(AlignAtt(3)), stream(40))
    assert decode(model.open(AlignAtt(3, layer=1)), stream(40)) == decode(MODELS[1].open(AlignAtt(3)), stream(40))


@pytest.mark.parametrize(("plain", "chunked"), [(AlignAtt(2), AlignAtt(2, chunk=4)), (LocalAgreement(), LocalAgreement(4))], ids=str)
def test_a_policy_asks_once_per_block_by_default(plain, chunked):
    def run(policy):
        session = MODELS[0].open(policy, pace=Pace(10.0, 4))
        return decode(session, stream(30)), session.cost

    assert run(plain) == run(chunked)
    one_by_one = MODELS[0].open(plain)
    decode(one_by_one, stream(30))
    assert one_by_one.cost.rows > run(plain)[1].rows
    assert parse_policy(str(plain)) == plain
