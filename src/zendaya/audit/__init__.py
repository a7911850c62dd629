"""The audit: does any output depend on input that has not arrived? (METHOD §7, Theorem 1, Corollary 1)

It takes a model as it is, trained or not, and replaces everything beyond a horizon by other values, by NaN, by nothing and by
more; what was written up to that horizon must be identical, to the bit. Where a replacement changes the shape of a padded
batch, the order of its sums changes too: there alone the comparison is in float64, to one part in 10⁹.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from zendaya.errors import ConfigError, SourceError
from zendaya.model import Model
from zendaya.records import Event
from zendaya.schedule import Full, PowerLaw, Schedule, WaitK
from zendaya.stream import Session

Variant = Literal["values", "nan", "nothing", "more"]
VARIANTS: tuple[Variant, ...] = ("values", "nan", "nothing", "more")
SAME_SHAPE = ("values", "nan")
TOLERANCE = 1e-9
"""Relative, in float64: rounding stays near 1e-14, and a leak of real weights is many orders above."""
MORE = 5
"""How many tokens `more` adds past the end."""


@dataclass(frozen=True)
class Violation:
    """A step whose output changed with input beyond its horizon."""

    path: str
    variant: str
    step: int
    source_index: int
    """The first source token beyond the horizon that was found to matter."""
    size: float
    """Largest change of a logit; NaN where it became unreadable, or where what changed is no logit."""
    detail: str = ""

    def __str__(self) -> str:
        moved = "" if math.isnan(self.size) else f", logits moved by {self.size:.3g}"
        what = f"{self.path}: step {self.step} depends on source token {self.source_index}, beyond its horizon"
        return f"{what} (replaced by {self.variant}{moved}){': ' + self.detail if self.detail else ''}"


@dataclass
class AuditReport:
    """What was tested and what was found."""

    schedule: str
    seed: int
    scale: str
    steps_tested: dict[str, int] = field(default_factory=dict)
    """Path to the number of steps compared with a changed future."""
    probes: int = 0
    violations: list[Violation] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.violations

    @property
    def first(self) -> Violation | None:
        """The earliest violation found on the first path that has one."""
        return self.violations[0] if self.violations else None

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "passed": self.passed}


def default_schedules(model: Model) -> list[Schedule]:
    """The dial from offline to starved, the paper's floor rounding, wait-k with the model's own ratio, and full context."""
    stride = model.config.window / model.config.max_steps
    return [PowerLaw(0.0), PowerLaw(0.3), PowerLaw(1.0), PowerLaw(1.5, "floor"), WaitK(5, stride), Full()]


def audit(
    model: Model, schedule: Schedule, *, scale: Literal["window", "segment"] = "window", seed: int = 0, cuts: int = 6,
    max_source: int = 120, max_steps: int = 64,
) -> AuditReport:  # fmt: skip
    """Test a model under a schedule on every path: teacher-forced and incremental, alone and in a batch, and live.

    `scale="segment"` gives the live runtime each stream's own length as its window, the paper's protocol: it is future
    information, and the audit says so. `cuts` is how many horizons are tried on each path.

    >>> report = audit(Model.from_preset("tiny"), PowerLaw(0.5), cuts=2)
    >>> report.passed
    True
    """
    config = model.config
    window = min(config.window, max_source)
    if window <= MORE:
        raise ConfigError(f"the audit needs a window of more than {MORE} source tokens: got {window}")
    if scale not in ("window", "segment"):
        raise ConfigError(f"scale must be 'window' or 'segment': got {scale!r}")
    auditor = _Auditor(
        model=model.eval(), schedule=schedule, window=window, steps=min(config.max_steps, max_steps), cuts=cuts,
        report=AuditReport(schedule=str(schedule), seed=seed, scale=scale), rng=torch.Generator().manual_seed(seed),
        segment=scale == "segment",
    )  # fmt: skip
    with torch.inference_mode():
        auditor.check_schedule()
        auditor.check_forced()
        auditor.check_forced_batch()
        if config.history:
            auditor.check_forced(history=True)
        auditor.check_incremental()
        auditor.check_incremental_batch()
        auditor.check_length()
    auditor.check_live()
    return auditor.report


@dataclass
class _Auditor:
    """One audit under way: the model, the schedule, the random streams, the findings."""

    model: Model
    schedule: Schedule
    window: int
    steps: int
    cuts: int
    report: AuditReport
    rng: torch.Generator
    segment: bool

    # Material.

    def _tokens(self, count: int, spread: float = 1.0) -> Tensor:
        return torch.randn(count, self.model.config.decoder.source_dim, generator=self.rng) * spread

    def _text(self, count: int) -> list[int]:
        return torch.randint(self.model.config.decoder.vocab_size, (count,), generator=self.rng).tolist()

    def _replace(self, source_TE: Tensor, keep: int, variant: Variant) -> Tensor:
        """The source with everything from index `keep` on replaced."""
        kept_TE, beyond = source_TE[:keep], source_TE.shape[0] - keep
        if variant == "nothing":
            return kept_TE.clone()
        if variant == "nan":
            return torch.cat([kept_TE, torch.full_like(source_TE[keep:], torch.nan)])
        return torch.cat([kept_TE, self._tokens(beyond + (MORE if variant == "more" else 0), spread=3.0)])

    def _some(self, values: Sequence[int]) -> list[int]:
        """At most `cuts` of the distinct values, evenly spread, first and last included."""
        distinct = sorted(set(values))
        places = np.unique(np.linspace(0, len(distinct) - 1, min(self.cuts, len(distinct))).round().astype(int))
        return [distinct[place] for place in places] if distinct else []

    # Findings.

    def _tested(self, path: str, steps: int) -> None:
        self.report.steps_tested[path] = max(self.report.steps_tested.get(path, 0), steps)

    def _compare(
        self, path: str, variant: str, base_NV: Tensor, probe_NV: Tensor, steps: Sequence[int], keep: int | Sequence[int], *,
        exact: bool, single: Callable[[int], Tensor] | None = None, num_source: int = 0,
    ) -> None:  # fmt: skip
        """Record a violation where a listed step (from 1) of the probe differs from the base; `keep` tokens were kept."""
        self.report.probes += 1
        self._tested(path, len(steps))
        for step in steps:
            base_V, probe_V = base_NV[step - 1], probe_NV[step - 1]
            size = float((base_V - probe_V).abs().max())
            if torch.equal(base_V, probe_V) if exact else size <= TOLERANCE * max(1.0, float(base_V.abs().max())):
                continue
            index = keep if isinstance(keep, int) else keep[step - 1]
            if single is not None:  # which token was it? change one at a time
                changed = (i for i in range(index, num_source) if not torch.equal(base_V, single(i)[step - 1]))
                index = next(changed, index)
            self.report.violations.append(Violation(path, variant, step, index, size))
            return

    # Paths.

    def check_schedule(self) -> None:
        """The theorem's one condition: horizons never decrease."""
        horizons = self.schedule.horizons(self.window, self.steps)
        self._tested("schedule", self.steps)
        for step in (np.nonzero(np.diff(horizons) < 0)[0] + 2).tolist():
            drop = int(horizons[step - 2] - horizons[step - 1])
            detail = f"the horizon decreases by {drop}, so that step {step} inherits what step {step - 1} read"
            self.report.violations.append(Violation("schedule", "nothing", step, int(horizons[step - 1]), math.nan, detail))
            return

    def check_forced(self, *, history: bool = False) -> None:
        """Teacher-forced, alone: row i may change only with the first Ω_i tokens (with a history, of the active window)."""
        path = "teacher-forced, history" if history else "teacher-forced"
        source_TE, text = self._tokens(self.window - MORE), self._text(self.steps - 1)
        past = [(self._tokens(self.window), self._text(self.steps - 1))] if history else None
        double = copy.deepcopy(self.model).double()

        def logits(model: Model, tokens_TE: Tensor) -> Tensor:
            return model(model.batch([tokens_TE], [text], self.schedule, scale=self.window, histories=past))[0]

        base_NV, base64_NV = logits(self.model, source_TE), logits(double, source_TE)
        horizons = np.minimum(self.schedule.horizons(self.window, self.steps), source_TE.shape[0])
        for keep in self._some(horizons[(horizons >= 1) & (horizons < source_TE.shape[0])].tolist()):
            steps = (np.nonzero(horizons <= keep)[0] + 1).tolist()

            def single(index: int) -> Tensor:
                changed_TE = source_TE.clone()
                changed_TE[index] = self._tokens(1, spread=3.0)[0]
                return logits(self.model, changed_TE)

            for variant in VARIANTS:
                probe_TE = self._replace(source_TE, keep, variant)
                if variant in SAME_SHAPE:
                    probe_NV = logits(self.model, probe_TE)
                    self._compare(path, variant, base_NV, probe_NV, steps, keep, exact=True, single=single, num_source=source_TE.shape[0])
                else:
                    self._compare(path, variant, base64_NV, logits(double, probe_TE), steps, keep, exact=False)

    def check_forced_batch(self) -> None:
        """Teacher-forced among neighbours of other lengths: they and the padding may be anything."""
        path = "teacher-forced, batch"
        lengths, counts = [self.window // 2, self.window * 2 // 3, self.window - MORE], [self.steps // 3, self.steps // 2, self.steps - 1]
        sources, texts = [self._tokens(max(1, n)) for n in lengths], [self._text(n) for n in counts]
        double = copy.deepcopy(self.model).double()
        me = 1
        own_steps = len(texts[me]) + 1
        horizons = np.minimum(self.schedule.horizons(self.window, own_steps), sources[me].shape[0])

        def logits(model: Model, tokens: list[Tensor], targets: list[list[int]]) -> Tensor:
            return model(model.batch(tokens, targets, self.schedule, scale=None if self.segment else self.window))[me, :own_steps]

        base_NV, base64_NV = logits(self.model, sources, texts), logits(double, sources, texts)
        everything = list(range(1, own_steps + 1))
        for variant in SAME_SHAPE:
            others = [s if i == me else self._replace(s, 0, variant) for i, s in enumerate(sources)]  # type: ignore[arg-type]
            self._compare(path, f"neighbours' {variant}", base_NV, logits(self.model, others, texts), everything, 0, exact=True)
            for keep in self._some(horizons[(horizons >= 1) & (horizons < sources[me].shape[0])].tolist())[:2]:
                if self.segment:
                    continue
                changed = [self._replace(s, keep if i == me else 0, variant) for i, s in enumerate(sources)]  # type: ignore[arg-type]
                steps = (np.nonzero(horizons <= keep)[0] + 1).tolist()
                self._compare(path, variant, base_NV, logits(self.model, changed, texts), steps, keep, exact=True)
        for variant, length, count in (("shorter", 1, 1), ("longer", self.window, self.steps - 1)):
            others = [s if i == me else self._tokens(length) for i, s in enumerate(sources)]
            targets = [t if i == me else self._text(count) for i, t in enumerate(texts)]
            probe_NV = logits(double, others, targets)
            self._compare(path, f"{variant} neighbours", base64_NV, probe_NV, everything, sources[me].shape[0], exact=False)

    def _forced_steps(self, texts: list[list[int]], horizons: list[list[int]], source_BTE: Tensor, num_steps: int) -> Tensor:
        """Logits (N, V) of stream 0 of an incremental, lock-step decode of given texts from source read at once."""
        cache = self.model.decoder.start(batch=source_BTE.shape[0])
        self.model.decoder.read(cache, source_BTE)
        prompt = torch.tensor([self.model.config.framing.prompt] * len(texts))
        rows = []
        for i in range(num_steps):
            now = [h[i] for h in horizons]
            if i == 0:
                for column in range(prompt.shape[1]):
                    logits_BV = self.model.decoder.step(cache, prompt[:, column], now)
            else:
                logits_BV = self.model.decoder.step(cache, torch.tensor([text[i - 1] for text in texts]), now)
            rows.append(logits_BV[0])
        return torch.stack(rows)

    def check_incremental(self) -> None:
        """Incremental, alone: every step with nothing beyond its horizon read, and some with other things read there."""
        path = "incremental"
        decoder, framing = self.model.decoder, self.model.config.framing
        source_TE, text = self._tokens(self.window - MORE), self._text(self.steps - 1)
        horizons = np.minimum(self.schedule.horizons(self.window, self.steps), source_TE.shape[0]).tolist()
        base_NV = self._forced_steps([text], [horizons], source_TE[None], self.steps)
        cache = decoder.start()
        rows = []
        probed = set(self._some([i for i, h in enumerate(horizons, start=1) if h < source_TE.shape[0]]))
        for step, horizon in enumerate(horizons, start=1):
            while cache.num_source < horizon:  # arrivals in random pieces, up to the horizon and no further
                count = int(torch.randint(1, horizon - cache.num_source + 1, (1,), generator=self.rng))
                decoder.read(cache, source_TE[None, cache.num_source : cache.num_source + count])
            ids = list(framing.prompt) if step == 1 else [text[step - 2]]
            for variant in ("values", "nan", "more"):
                if step in probed:
                    probe = cache.clone()
                    decoder.read(probe, self._replace(source_TE, cache.num_source, variant)[None, cache.num_source :])
                    self._compare(path, variant, base_NV, self._rows(probe, ids, horizon, step), [step], horizon, exact=True)
            rows.append(self._rows(cache, ids, horizon, 1)[0])
        self._compare(path, "nothing", base_NV, torch.stack(rows), list(range(1, self.steps + 1)), horizons, exact=True)

    def _rows(self, cache: Any, ids: list[int], horizon: int, step: int) -> Tensor:
        """Logits of one more step, put at row `step` of a table to compare."""
        for token in ids:
            logits_1V = self.model.decoder.step(cache, torch.tensor([token]), horizon)
        return logits_1V.expand(step, -1)

    def check_incremental_batch(self) -> None:
        """Incremental among neighbours at other horizons: they and the own future may be anything."""
        path = "incremental, batch"
        num_steps, count = min(self.steps, 24), self.window - MORE
        source_BTE = torch.stack([self._tokens(count) for _ in range(3)])
        texts = [self._text(num_steps) for _ in range(3)]
        lengths = [num_steps, max(1, num_steps // 2), self.steps]
        horizons = [np.minimum(self.schedule.horizons(self.window, n, num_steps=num_steps), count).tolist() for n in lengths]
        base_NV = self._forced_steps(texts, horizons, source_BTE, num_steps)
        for step in self._some([i for i, h in enumerate(horizons[0], start=1) if h < count] or [num_steps])[-3:]:
            keep = horizons[0][step - 1]
            for variant in SAME_SHAPE:
                probe_BTE = torch.stack([self._replace(s, keep if i == 0 else 0, variant) for i, s in enumerate(source_BTE)])  # type: ignore[arg-type]
                probe_NV = self._forced_steps(texts, horizons, probe_BTE, step)
                self._compare(
                    path, variant, base_NV, probe_NV, [i for i in range(1, step + 1) if horizons[0][i - 1] <= keep], keep, exact=True
                )

    def check_length(self) -> None:
        """The length head reads what it may: its buffer of the window, and nothing of its neighbours or the padding."""
        if self.model.length is None:
            return
        path = "length head"
        causal = self.model.config.length == "inf"
        keep = self.schedule.buffer(self.window, self.model.config.max_steps) if causal else self.window
        source_TE, past = self._tokens(self.window + MORE), (self._tokens(self.window), self._text(self.steps - 1))
        history = self.model._history([past, None, past])
        lengths_B = torch.tensor([keep] * 3)

        def logits(source_BTE: Tensor) -> Tensor:
            return self.model.length_logits(source_BTE, lengths_B, history)

        source_BTE = torch.stack([source_TE, self._tokens(source_TE.shape[0]), self._tokens(source_TE.shape[0])])
        base_1C, base_steps = logits(source_BTE)[:1], self.model.predict_steps(source_TE, keep, past)
        for variant in VARIANTS:
            if variant in SAME_SHAPE:
                probe_BTE = torch.stack([self._replace(s, keep if i == 0 else 0, variant) for i, s in enumerate(source_BTE)])
                self._compare(path, variant, base_1C, logits(probe_BTE)[:1], [1], keep, exact=True)
            probe_TE = self._replace(source_TE, keep, variant)
            if causal and self.model.predict_steps(probe_TE, keep, past) != base_steps:
                detail = f"the predicted length changes with tokens past the first {keep}"
                self.report.violations.append(Violation(path, variant, 1, keep, math.nan, detail))
                return

    def check_live(self) -> None:
        """Live, closed loop: from a stream pushed to a Session to the text and logits it gives, over several windows."""
        path = "live"
        # Two windows and part of a third; under the segment protocol a stream is one window, its own length.
        count = self.window - MORE if self.segment else 2 * self.window + self.window // 2
        stream_TE = self._tokens(count)
        base, base_rows = self._live(stream_TE)
        for event in base:
            expected = int(self.schedule.at(event.step, source=self._live_window(stream_TE), steps=event.predicted_steps))
            if event.horizon != expected:
                detail = f"window {event.window}: the runtime read {event.horizon} tokens where the schedule gives {expected}"
                self.report.violations.append(Violation(path, "nothing", event.step, expected, math.nan, detail))
                return
        # What an event may depend on: the windows before, and its horizon of its own (a fix head reads the whole window). An event
        # that was written because the stream had ended depends on that, and has nothing after it to replace.
        whole_window = self.model.config.length == "fix"
        keeps = [e.window * self.window + (self.window if whole_window else max(1, e.horizon)) for e in base]
        for number in self._some([n for n, e in enumerate(base) if e.effective_horizon == e.horizon and keeps[n] <= count]):
            keep = keeps[number]
            for variant in VARIANTS:
                if keep == count and variant != "more":
                    continue
                probe, probe_rows = self._live(self._replace(stream_TE, keep, variant), number + 1)
                self.report.probes += 1
                self._tested(path, number + 1)
                same = [a == b and torch.equal(x, y) for a, b, x, y in zip(base, probe, base_rows, probe_rows, strict=False)]
                if len(probe) > number and all(same[: number + 1]):
                    continue
                first = next((i for i, ok in enumerate(same[: number + 1]) if not ok), len(probe))
                size = float((base_rows[first] - probe_rows[first]).abs().max()) if first < len(probe) else math.nan
                where = f"window {base[first].window}" + ("; the segment's own length is future information" if self.segment else "")
                self.report.violations.append(Violation(path, variant, base[first].step, keep, size, where))
                return

    def _live_window(self, stream_TE: Tensor) -> int:
        return stream_TE.shape[0] if self.segment else self.window

    def _live(self, stream_TE: Tensor, limit: int | None = None) -> tuple[list[Event], list[Tensor]]:
        """The first `limit` events of a live decode of the stream, pushed in random pieces, and the logits behind each."""
        fixed = self.steps if self.model.length is None and self.schedule.needs_length else None
        session = self.model.open(self.schedule, window=self._live_window(stream_TE), steps=fixed, max_steps=self.steps)
        rows: list[Tensor] = []
        logits = session._logits

        def watched(horizon: int) -> Tensor:
            rows.append(logits(horizon))
            return rows[-1]

        session._logits = watched  # type: ignore[method-assign]
        events: list[Event] = []
        try:
            for event in self._drive(session, stream_TE):
                events.append(event)
                if len(events) == limit:
                    break
        except SourceError:  # it came to a NaN it was licensed to read
            pass
        return events, rows

    def _drive(self, session: Session, stream_TE: Tensor) -> Iterator[Event]:
        at = 0
        while at < stream_TE.shape[0]:
            count = int(torch.randint(1, stream_TE.shape[0] - at + 1, (1,), generator=self.rng))
            yield from session.push(stream_TE[at : at + count])
            at += count
        yield from session.finish()
