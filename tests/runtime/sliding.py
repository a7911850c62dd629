"""Source tokens as an encoder gives them that revises its last tokens and slides, for tests of sessions."""

import dataclasses

import numpy as np
import torch

from zendaya import Model
from zendaya.encoders.base import Tokens
from zendaya.nn.presets import preset
from zendaya.runtime.options import DecodeOptions, Pace
from zendaya.runtime.session import Session

WINDOW, OVERLAP, BLOCK, REVISE, RATE = 120, 40, 8, 12, 10.0


def sliding_model(seed=3, **changes):
    """A random model whose windows of 120 tokens overlap by about 40, and which says its end seldom."""
    config = preset("tiny")
    decoder = dataclasses.replace(config.decoder, max_source=WINDOW)
    shape = {"window_tokens": WINDOW, "overlap_tokens": OVERLAP, "history": False, "max_steps": 60}
    model = Model.from_preset("tiny", seed=seed, decoder=decoder, **{**shape, **changes})
    with torch.no_grad():  # weights that listen, so that the text depends on the source
        for layer in model.decoder.layers:
            layer.cross_attention.out.weight.mul_(20)
            layer.cross_attention.query.weight.mul_(4)
    return model


def parts(total=500, *, block=BLOCK, revise=REVISE, seed=0, dim=16):
    """Blocks of source tokens: each revises the last ones before it, and begins a new span where the next does not fit."""
    generator = torch.Generator().manual_seed(seed)
    found, given, start = [], 0, 0
    while given < total:
        new = min(block, total - given)
        slides = given + block - start > WINDOW
        if slides:
            start = given - OVERLAP - int(torch.randint(-5, 6, (1,), generator=generator))
        revised = given - start if slides else min(revise, given - start)
        values = torch.randn(revised + new, dim, generator=generator)
        given += new
        found.append(Tokens(values, np.full(len(values), given / RATE), revised, start if slides else None))
    return found


def open_session(model, schedule, *, engine=None, steps=40, block=BLOCK):
    return Session(model, DecodeOptions(schedule=schedule, pace=Pace(RATE, block), steps=steps), engine=engine)


def push(session, part):
    return session.push(part.values_TE, part.arrival_s, revised=part.revised, restart=part.restart)


def play(session, given):
    """The events of a session, drawn block by block."""
    return [event for part in given for event in push(session, part)] + list(session.finish())
