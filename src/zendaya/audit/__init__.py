"""The audit: does any output depend on input that has not arrived? (method.md §7, Theorem 1, Corollary 1)

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
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from zendaya.decoder import History
from zendaya.engine import Engine
from zendaya.errors import ConfigError, SourceError
from zendaya.model import Model
from zendaya.records import Event
from zendaya.schedule import Full, Learned, PowerLaw, Schedule, WaitK
from zendaya.stream import Session

Past = tuple[Tensor, list[int]] | None
Variant = Literal["values", "huge", "nan", "nothing", "more"]
VARIANTS: tuple[Variant, ...] = ("values", "huge", "nan", "nothing", "more")
SAME_SHAPE: tuple[Variant, ...] = ("values", "huge", "nan")
TOLERANCE = 1e-9
"""Relative, in float64: rounding stays near 1e-14, and a leak of real weights is many orders above."""
MORE = 5
"""How many tokens `more` adds past the end."""
SWEEP = 64
"""How many horizons are tried with NaN, the sharpest replacement: whatever touches one shows it."""
DRAWS = 8
"""How many windows the length head is tried on."""


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
    window: int
    """Source tokens of the windows tested, at most the model's own."""
    steps: int
    """Steps of the texts tested, at most the model's own."""
    steps_tested: dict[str, int] = field(default_factory=dict)
    """Path to the number of steps tested at their own horizon."""
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
        """Plain values; what is not a number is None, as JSON has it."""
        record = {**dataclasses.asdict(self), "passed": self.passed}
        for violation in record["violations"]:
            violation["size"] = violation["size"] if math.isfinite(violation["size"]) else None
        return record


def default_schedules(model: Model) -> list[Schedule]:
    """The dial from offline to starved, the paper's floor rounding, wait-k with the model's own ratio, and full context."""
    stride = Fraction(model.config.window, model.config.max_steps)
    return [PowerLaw(0.0), PowerLaw(0.3), PowerLaw(1.0), PowerLaw(1.5, "floor"), WaitK(5, stride), Full()]


def audit(
    model: Model, schedule: Schedule, *, scale: Literal["window", "segment"] = "window", seed: int = 0, cuts: int = 4,
    max_source: int = 135, max_steps: int = 165, engine: Engine | None = None,
) -> AuditReport:  # fmt: skip
    """Test a model under a schedule on every path: teacher-forced and incremental, alone and in a batch, and live.

    `scale="segment"` gives the live runtime each stream's own length as its window, the paper's protocol: it is future
    information, and the audit says so. `cuts` is how many horizons are tried with every replacement on each path; NaN and
    nothing are tried at many more. Windows and texts longer than `max_source` and `max_steps` are tested at that size. A learned
    schedule is tested under every γ it may choose, and live as it chooses. With an `engine`, the incremental and live paths are its.

    >>> report = audit(Model.from_preset("tiny"), PowerLaw(0.5), cuts=2)
    >>> report.passed
    True
    """
    config = model.config
    window, steps = min(config.window, max_source), min(config.max_steps, max_steps)
    if window <= MORE or steps < 4 or cuts < 1:
        raise ConfigError(f"the audit needs a window above {MORE} tokens, 4 steps and 1 cut: got {window}, {steps} and {cuts}")
    if scale not in ("window", "segment"):
        raise ConfigError(f"scale must be 'window' or 'segment': got {scale!r}")
    report = AuditReport(schedule=str(schedule), seed=seed, scale=scale, window=window, steps=steps)
    rng = torch.Generator().manual_seed(seed)
    auditor = _Auditor(model, schedule, window, steps, cuts, report, rng, scale == "segment", copy.deepcopy(model).double().eval(), engine)
    choices: Sequence[Schedule] = [PowerLaw(gamma) for gamma in config.gammas] if isinstance(schedule, Learned) else [schedule]
    if not choices:
        raise ConfigError("this model has no dial head to choose a gamma: train one with `zendaya learn-gamma`, or give one gamma")
    training = model.training
    try:
        model.eval()
        with torch.inference_mode():
            for choice in choices:
                each = dataclasses.replace(auditor, schedule=choice)
                each.check_schedule()
                for history in (False, True) if config.history else (False,):
                    each.check_forced(history=history)
                    each.check_forced_batch(history=history)
                each.check_incremental()
                each.check_incremental_batch()
                each.check_length()
            if isinstance(schedule, Learned):
                auditor.check_dial(schedule)
        auditor.check_live()
    finally:
        model.train(training)
    return report


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
    double: Model
    """The same model in float64, for replacements that change shapes."""
    engine: Engine | None = None
    """What computes the incremental paths, if not the decoder."""

    # Material.

    def _tokens(self, count: int, spread: float = 1.0) -> Tensor:
        if self.model.config.decoder.source_vocab:
            return torch.randint(self.model.config.decoder.source_vocab, (count, 1), generator=self.rng).float()
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
        other_TE = self._tokens(beyond + (MORE if variant == "more" else 0), spread=3.0)
        if variant == "huge":  # finite, of every size that float32 has
            other_TE = torch.sign(other_TE) * 10 ** torch.empty_like(other_TE).uniform_(3, 38, generator=self.rng)
        return torch.cat([kept_TE, other_TE])

    def _some(self, values: Sequence[int], count: int | None = None) -> list[int]:
        """At most `count` (or `cuts`) of the distinct values, evenly spread, first and last included."""
        distinct = sorted(set(values))
        places = np.unique(np.linspace(0, len(distinct) - 1, min(count or self.cuts, len(distinct))).round().astype(int))
        return [distinct[place] for place in places] if distinct else []

    def _horizons(self, num_source: int, steps: int, num_steps: int | None = None) -> list[int]:
        """What each step may read of a source of that many tokens."""
        return np.minimum(self.schedule.horizons(self.window, steps, num_steps=num_steps), num_source).tolist()

    # Findings.

    def _tested(self, path: str, steps: int) -> None:
        self.report.steps_tested[path] = self.report.steps_tested.get(path, 0) + steps

    def _compare(
        self, path: str, variant: str, base_NV: Tensor, probe_NV: Tensor, steps: Sequence[int], keep: int | Sequence[int], *,
        exact: bool = True, single: Callable[[int], Tensor] | None = None, num_source: int = 0,
    ) -> None:  # fmt: skip
        """Record a violation where a listed step (from 1) of the probe differs from the base; `keep` tokens were kept."""
        self.report.probes += 1
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

    def check_forced(self, *, history: bool) -> None:
        """Teacher-forced, alone: row i may change only with the first Ω_i tokens (with a history, of the active window)."""
        path = "teacher-forced, history" if history else "teacher-forced"
        source_TE, text = self._tokens(self.window - MORE), self._text(self.steps - 1)
        past = [(self._tokens(self.window), self._text(self.steps - 1))] if history else None

        def logits(model: Model, tokens_TE: Tensor) -> Tensor:
            return model(model.batch([tokens_TE], [text], self.schedule, scale=self.window, histories=past))[0]

        def single(index: int) -> Tensor:
            changed_TE = source_TE.clone()
            changed_TE[index] = self._tokens(1, spread=3.0)[0]
            return logits(self.model, changed_TE)

        base_NV, base64_NV = logits(self.model, source_TE), logits(self.double, source_TE)
        horizons = self._horizons(source_TE.shape[0], self.steps)
        keeps = [h for h in horizons if h < source_TE.shape[0]]
        thorough = set(self._some(keeps))
        for keep in sorted({*self._some(keeps, SWEEP), *thorough}):
            steps = [step for step, h in enumerate(horizons, start=1) if h <= keep]
            self._tested(path, horizons.count(keep))
            for variant in VARIANTS if keep in thorough else ("nan",):
                probe_TE = self._replace(source_TE, keep, variant)
                if variant in SAME_SHAPE:
                    probe_NV = logits(self.model, probe_TE)
                    self._compare(path, variant, base_NV, probe_NV, steps, keep, single=single, num_source=source_TE.shape[0])
                elif keep > 0:  # a clip has at least one token
                    self._compare(path, variant, base64_NV, logits(self.double, probe_TE), steps, keep, exact=False)

    def check_forced_batch(self, *, history: bool) -> None:
        """Teacher-forced among neighbours of other lengths: they, their histories and the padding may be anything."""
        path = "teacher-forced, history, batch" if history else "teacher-forced, batch"
        sources = [self._tokens(n) for n in (self.window // 2, self.window * 2 // 3, self.window - MORE)]
        texts = [self._text(n) for n in (self.steps // 3, self.steps // 2, self.steps - 1)]
        pasts: list[tuple[Tensor, list[int]] | None] = [
            (self._tokens(self.window), self._text(self.steps - 1)), None, (self._tokens(MORE), self._text(1)),
        ]  # fmt: skip
        scale = None if self.segment else self.window

        def logits(model: Model, tokens: list[Tensor], targets: list[list[int]], histories: Any) -> Tensor:
            return model(model.batch(tokens, targets, self.schedule, scale=scale, histories=histories if history else None))

        base_BNV, base64_BNV = logits(self.model, sources, texts, pasts), logits(self.double, sources, texts, pasts)
        for me in range(3):
            everything = list(range(1, len(texts[me]) + 2))
            num_source = sources[me].shape[0]
            self._tested(path, len(everything))
            for variant in SAME_SHAPE:
                others = [s if i == me else self._replace(s, 0, variant) for i, s in enumerate(sources)]
                probe_BNV = logits(self.model, others, texts, pasts)
                self._compare(path, f"neighbours' {variant}", base_BNV[me], probe_BNV[me], everything, num_source)
                horizons = self._horizons(num_source, len(everything))
                for keep in [] if self.segment else self._some([h for h in horizons if h < num_source])[-2:]:
                    changed = [self._replace(s, keep if i == me else 0, variant) for i, s in enumerate(sources)]
                    steps = [step for step, h in enumerate(horizons, start=1) if h <= keep]
                    self._compare(path, variant, base_BNV[me], logits(self.model, changed, texts, pasts)[me], steps, keep)
            for size, length, count in (("shorter", 1, 1), ("longer", self.window, self.steps - 1)):
                others = [s if i == me else self._tokens(length) for i, s in enumerate(sources)]
                targets = [t if i == me else self._text(count) for i, t in enumerate(texts)]
                past = [p if i == me else (self._tokens(length), self._text(count)) for i, p in enumerate(pasts)]
                probe_BNV = logits(self.double, others, targets, past)
                self._compare(path, f"{size} neighbours", base64_BNV[me], probe_BNV[me], everything, num_source, exact=False)

    def _forced_steps(self, texts: list[list[int]], horizons: list[list[int]], source_BTE: Tensor, num_steps: int) -> Tensor:
        """Logits (B, N, V) of an incremental, lock-step decode of given texts from source read at once."""
        decoder, framing = self.engine or self.model.decoder, self.model.config.framing
        cache = decoder.start(batch=source_BTE.shape[0])
        decoder.read(cache, source_BTE)
        rows = []
        for i in range(num_steps):
            now = [h[i] for h in horizons]
            for column in range(len(framing.prompt)) if i == 0 else (i - 1,):
                ids = [framing.prompt[column]] * len(texts) if i == 0 else [text[column] for text in texts]
                logits_BV = decoder.step(cache, torch.tensor(ids), now)
            rows.append(logits_BV)
        return torch.stack(rows, 1)

    def check_incremental(self) -> None:
        """Incremental, alone: every step with nothing beyond its horizon read, and some with other things read there."""
        path = "incremental"
        decoder, framing = self.engine or self.model.decoder, self.model.config.framing
        source_TE, text = self._tokens(self.window - MORE), self._text(self.steps - 1)
        horizons = self._horizons(source_TE.shape[0], self.steps)
        probed = set(self._some([i for i, h in enumerate(horizons, start=1) if h < source_TE.shape[0]]))
        whole, part = decoder.start(), decoder.start()  # all of the source read at the beginning; only what each step may read
        decoder.read(whole, source_TE[None])
        base, rows = [], []
        for step, horizon in enumerate(horizons, start=1):
            while part.num_source < horizon:  # arrivals in random pieces, up to the horizon and no further
                count = int(torch.randint(1, horizon - part.num_source + 1, (1,), generator=self.rng))
                decoder.read(part, source_TE[None, part.num_source : part.num_source + count])
            ids = torch.tensor([framing.prompt if step == 1 else [text[step - 2]]])
            probes = {variant: part.clone() for variant in ("values", "huge", "nan", "more") if step in probed}
            base.append(decoder.prefill(whole, ids, horizon)[0])
            rows.append(decoder.prefill(part, ids, horizon)[0])
            for variant, cache in probes.items():
                decoder.read(cache, self._replace(source_TE, cache.num_source, variant)[None, cache.num_source :])  # type: ignore[arg-type]
                probe_1V = decoder.prefill(cache, ids, horizon)
                self._compare(path, variant, base[-1].expand(step, -1), probe_1V.expand(step, -1), [step], horizon)
        self._tested(path, self.steps)
        self._compare(path, "nothing", torch.stack(base), torch.stack(rows), list(range(1, self.steps + 1)), horizons)

    def check_incremental_batch(self) -> None:
        """Incremental among neighbours at other horizons: they and the own future may be anything."""
        path = "incremental, batch"
        num_steps, count = min(self.steps, 24), self.window - MORE
        source_BTE = torch.stack([self._tokens(count) for _ in range(3)])
        texts = [self._text(num_steps) for _ in range(3)]
        horizons = [self._horizons(count, n, num_steps) for n in (num_steps, max(1, num_steps // 2), self.steps)]
        base_BNV = self._forced_steps(texts, horizons, source_BTE, num_steps)
        for me in range(3):
            chosen = self._some([i for i, h in enumerate(horizons[me], start=1) if h < count] or [num_steps])[-3:]
            self._tested(path, len(chosen))
            for step in chosen:
                keep = horizons[me][step - 1]
                steps = [i for i in range(1, step + 1) if horizons[me][i - 1] <= keep]
                for variant in SAME_SHAPE:
                    probe_BTE = torch.stack([self._replace(s, keep if i == me else 0, variant) for i, s in enumerate(source_BTE)])
                    probe_BNV = self._forced_steps(texts, horizons, probe_BTE, step)
                    self._compare(path, variant, base_BNV[me], probe_BNV[me], steps, keep)

    def check_length(self) -> None:
        """The length head reads what it may: its buffer of the window, and nothing of its neighbours or the padding."""
        if self.model.length is None:
            return
        keep = self._buffer(self.schedule)

        def logits(model: Model, source_BTE: Tensor, lengths_B: Tensor, history: History | None) -> Tensor:
            return model.length_logits(source_BTE, lengths_B, history)

        def steps(window_TE: Tensor, past: Past) -> int:
            return self.model.predict_steps(window_TE, keep, past)

        self._check_head("length head", keep, "the predicted length", logits, steps)

    def check_dial(self, schedule: Learned) -> None:
        """The dial head reads what it may, for each γ it may settle for: that one's buffer."""
        gammas = self.model.config.gammas

        def costs(model: Model, source_BTE: Tensor, lengths_B: Tensor, history: History | None) -> Tensor:
            return torch.cat(model.gamma_costs(source_BTE, lengths_B, history), -1)

        for place in range(len(gammas) - 1, 0, -1):
            keep = self._buffer(PowerLaw(gammas[place]))

            def settles(window_TE: Tensor, past: Past, place: int = place, keep: int = keep) -> int:
                return self.model.settles_for(place, window_TE, keep, past, price=schedule.price)

            self._check_head("dial head", keep, f"whether gamma={gammas[place]} is taken", costs, settles)

    def _buffer(self, schedule: Schedule) -> int:
        """Tokens of a window that a head may read under a schedule."""
        causal = self.model.config.length == "inf"
        return schedule.buffer(self.window, self.model.config.max_steps) if causal else self.window

    def _check_head(
        self, path: str, keep: int, what: str, outputs: Callable[[Model, Tensor, Tensor, History | None], Tensor],
        decide: Callable[[Tensor, Past], int],
    ) -> None:  # fmt: skip
        causal = self.model.config.length == "inf"
        lengths_B = torch.tensor([keep] * 3)
        for _ in range(DRAWS):
            source_BTE = torch.stack([self._tokens(self.window + MORE) for _ in range(3)])
            past = (self._tokens(self.window // 2), self._text(self.steps // 2))
            base_1C = outputs(self.model, source_BTE, lengths_B, self.model._history([past, None, past]))[:1]
            base = decide(source_BTE[0], past)
            self._tested(path, 1)
            for variant in VARIANTS:
                if variant in SAME_SHAPE:
                    probe_BTE = torch.stack([self._replace(s, keep if i == 0 else 0, variant) for i, s in enumerate(source_BTE)])
                    probe_1C = outputs(self.model, probe_BTE, lengths_B, self.model._history([past, past, None]))[:1]
                    self._compare(path, variant, base_1C, probe_1C, [1], keep)
                if causal and decide(self._replace(source_BTE[0], keep, variant), past) != base:
                    detail = f"{what} changes with tokens past the first {keep}"
                    self.report.violations.append(Violation(path, variant, 1, keep, math.nan, detail))
                    return
            longer = (self._tokens(self.window), self._text(self.steps - 1))
            source64_BTE = source_BTE.double()
            base64_1C, probe64_1C = (
                outputs(self.double, source64_BTE, lengths_B, self.double._history(histories))[:1]
                for histories in ([past, None, past], [past, longer, longer])
            )
            self._compare(path, "longer neighbours", base64_1C, probe64_1C, [1], keep, exact=False)

    def check_live(self) -> None:
        """Live, closed loop: from a stream pushed to a Session to the text and logits it gives, over several windows."""
        path = "live"
        # Three windows and part of a fourth; under the segment protocol a stream is one window, its own length.
        count = self.window - MORE if self.segment else 3 * self.window + self.window // 2
        stream_TE = self._tokens(count)
        base, base_rows = self._live(stream_TE, [count])
        for event in base:
            schedule = self.schedule if event.gamma is None else PowerLaw(event.gamma)
            # A model that pauses goes on along its schedule without writing, at the last to the whole window.
            place, window = event.step + event.pauses, self._live_window(stream_TE)
            expected = window if place > self.steps else int(schedule.at(place, source=window, steps=event.predicted_steps))
            if event.horizon != expected:
                detail = f"window {event.window}: the runtime read {event.horizon} tokens where the schedule gives {expected}"
                self.report.violations.append(Violation(path, "nothing", event.step, expected, math.nan, detail))
                return
        # What an event may depend on: the windows before, and its horizon of its own (a fix head reads the whole window). An event
        # that was written because the stream had ended depends on that, and has nothing after it to replace.
        whole_window = self.model.config.length == "fix"
        keeps = [e.window * self.window + (self.window if whole_window else max(1, e.horizon)) for e in base]
        self._tested(path, len(base))
        # One token at a time, every event is written before anything beyond its horizon has arrived.
        arriving, arriving_rows = self._live(stream_TE, [1] * count)
        if self._differs(path, "nothing yet arrived", base, base_rows, arriving, arriving_rows, len(base) - 1, keeps):
            return
        for number in self._some([n for n, e in enumerate(base) if e.effective_horizon == e.horizon and keeps[n] <= count]):
            for variant in VARIANTS:
                if keeps[number] == count and variant != "more":
                    continue
                probe, probe_rows = self._live(self._replace(stream_TE, keeps[number], variant), None, number + 1)
                if self._differs(path, variant, base, base_rows, probe, probe_rows, number, keeps):
                    return

    def _differs(
        self, path: str, variant: str, base: list[Event], base_rows: list[Tensor], probe: list[Event], probe_rows: list[Tensor],
        number: int, keeps: list[int],
    ) -> bool:  # fmt: skip
        """Whether the events up to that number, or the logits behind them, are not the same; recorded if so."""
        self.report.probes += 1
        same = [a == b and torch.equal(x, y) for a, b, x, y in zip(base, probe, base_rows, probe_rows, strict=False)][: number + 1]
        if len(same) > number and all(same):
            return False
        first = same.index(False) if False in same else len(same)
        size = float((base_rows[first] - probe_rows[first]).abs().max()) if first < len(same) else math.nan
        where = f"window {base[first].window}" + ("; the segment's own length is future information" if self.segment else "")
        self.report.violations.append(Violation(path, variant, base[first].step, keeps[first], size, where))
        return True

    def _live_window(self, stream_TE: Tensor) -> int:
        return stream_TE.shape[0] if self.segment else self.window

    def _live(self, stream_TE: Tensor, pieces: list[int] | None, limit: int | None = None) -> tuple[list[Event], list[Tensor]]:
        """The first `limit` events of a live decode of the stream, pushed in the given or random pieces, and the logits behind each."""
        fixed = self.steps if self.model.length is None and self.schedule.needs_length else None
        session = self.model.open(self.schedule, window=self._live_window(stream_TE), steps=fixed, max_steps=self.steps, engine=self.engine)
        rows: list[Tensor] = []
        last: list[Tensor] = []
        logits = session._logits

        def watched(horizon: int) -> Tensor:
            last[:] = [logits(horizon)]
            return last[0]

        session._logits = watched  # type: ignore[method-assign]
        events: list[Event] = []
        try:
            for event in self._drive(session, stream_TE, pieces):
                events.append(event)
                rows.append(last[0])
                if len(events) == limit:
                    break
        except SourceError:  # it came to a NaN it was licensed to read
            pass
        return events, rows

    def _drive(self, session: Session, stream_TE: Tensor, pieces: list[int] | None) -> Iterator[Event]:
        at = 0
        left = iter(pieces or [])
        while at < stream_TE.shape[0]:
            count = next(left, 0) or int(torch.randint(1, stream_TE.shape[0] - at + 1, (1,), generator=self.rng))
            yield from session.push(stream_TE[at : at + count])
            at += count
        yield from session.finish()
