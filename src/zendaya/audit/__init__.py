"""The audit: no output depends on input that has not arrived (method.md §7, Theorem 1, Corollary 1).

Everything beyond a horizon is replaced by other values, by NaN, by nothing and by more; outputs up to that horizon must be equal to the
bit. Where a replacement changes the shape of a padded batch, sums are added in another order: there float64 must agree to 10⁻⁹.
"""

from __future__ import annotations

import copy
import dataclasses
from fractions import Fraction
from typing import Literal

import torch

from zendaya.audit import decoder, live
from zendaya.audit.probe import MORE, Probe
from zendaya.audit.probe import AuditReport as AuditReport
from zendaya.errors import ConfigError
from zendaya.nn.model import Model
from zendaya.runtime.engine import Engine
from zendaya.schedule import Full, PowerLaw, Schedule, WaitK


def default_schedules(model: Model) -> list[Schedule]:
    """The schedules audited by default: the dial, floor rounding, a head start, wait-k at the model's own ratio, full context."""
    stride = Fraction(model.config.window_tokens, model.config.max_steps)
    return [PowerLaw(0.0), PowerLaw(0.3), PowerLaw(1.0), PowerLaw(1.5, "floor"), PowerLaw(1.0, head=3), WaitK(5, stride), Full()]


def audit(
    model: Model, schedule: Schedule, *, scale: Literal["window", "segment"] = "window", seed: int = 0, cuts: int = 4,
    max_source: int = 135, max_steps: int = 165, engine: Engine | None = None,
) -> AuditReport:  # fmt: skip
    """Test a model under a schedule on every path: teacher-forced and incremental, alone and in a batch, and live.

    `scale="segment"` sets the live window to each stream's own length, as in the paper, and reports that future information as a leak.
    `cuts` is the number of horizons tried with every replacement on each path. Windows and texts are cut to `max_source` tokens and
    `max_steps` steps. A learned schedule is tested under every γ it may choose. `engine` runs the incremental and live paths.

    >>> audit(Model.from_preset("tiny"), PowerLaw(0.5), cuts=2).passed
    True
    """
    config = model.config
    window, steps = min(config.window_tokens, max_source), min(config.max_steps, max_steps)
    if window <= MORE or steps < 4 or cuts < 1:
        raise ConfigError(f"the audit needs a window above {MORE} tokens, 4 steps and 1 cut: got {window}, {steps} and {cuts}")
    if scale not in ("window", "segment"):
        raise ConfigError(f"scale must be 'window' or 'segment': got {scale!r}")
    report = AuditReport(schedule=str(schedule), seed=seed, scale=scale, window_tokens=window, steps=steps)
    rng = torch.Generator().manual_seed(seed)
    probe = Probe(model, schedule, window, steps, cuts, report, rng, scale == "segment", copy.deepcopy(model).double().eval(), engine)
    choices = schedule.choices(config.gammas)
    if not choices:
        raise ConfigError("this model has no gamma head: train one with `zendaya learn-gamma`, or give one gamma")
    training = model.training
    try:
        model.eval()
        with torch.inference_mode():
            for choice in choices:
                each = dataclasses.replace(probe, schedule=choice)
                decoder.check_schedule(each)
                for history in (False, True) if config.history else (False,):
                    decoder.check_forced(each, history=history)
                    decoder.check_forced_batch(each, history=history)
                decoder.check_incremental(each)
                decoder.check_incremental_batch(each)
                decoder.check_length(each)
            if schedule.learned:
                decoder.check_gamma(probe, schedule)
        live.check_live(probe)
    finally:
        model.train(training)
    return report
