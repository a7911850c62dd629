import dataclasses
import json

import pytest
import torch

from zendaya import Model, PowerLaw, WaitK, ZendayaError
from zendaya.audit import AuditReport, audit, default_schedules
from zendaya.audit.leaks import LEAKS, Leak, VoiceLeak
from zendaya.nn.decoder import Decoder
from zendaya.nn.presets import preset, presets

# On which path each planted leak must show.
FOUND_ON = {
    "history": "teacher-forced, history",
    "decreasing": "schedule",
    "softmax": "teacher-forced",
    "length": "length head",
    "dial": "gamma head",
    "segment": "live",
    "bidirectional": "teacher-forced",
    "padding": "teacher-forced, batch",
    "head": "teacher-forced",
    "no-head": "teacher-forced",
    "hold": "live",
    "cache": "incremental",
    "voice": "voice gate",
}


@pytest.mark.parametrize("name", LEAKS)
def test_each_planted_leak_is_found(name):
    report = LEAKS[name].audit(Model.from_preset("tiny"), cuts=2)
    assert not report.passed
    assert report.first.path == FOUND_ON[name]
    assert report.first.step >= 1
    assert report.first.source_index >= 1


@pytest.mark.parametrize(("name", "live"), [("decreasing", True), ("segment", True), ("length", False), ("dial", False)])
def test_leaks_show_live_too(name, live):
    assert live == ("live" in {violation.path for violation in LEAKS[name].audit(Model.from_preset("tiny"), cuts=2).violations})


def test_a_decreasing_schedule_shows_in_the_outputs():
    paths = {violation.path for violation in LEAKS["decreasing"].audit(Model.from_preset("tiny"), cuts=2).violations}
    assert {"schedule", "teacher-forced", "incremental, batch", "live"} <= paths


class OtherStreamsKeys(Decoder):
    """In a batch, every stream reads the first one's source."""

    @staticmethod
    def _cross_sliced(attention, x_BND, cross, index, stream, horizon):
        first = [(k[:1].expand(k.shape), v[:1].expand(v.shape)) for k, v in cross]
        return Decoder._cross_sliced(attention, x_BND, first, index, stream, horizon)


class LargestHorizon(Decoder):
    """In a batch, all streams but the first read as far as the furthest."""

    def _write_rows(self, cache, ids_BN, horizons, tap=None):
        return super()._write_rows(cache, ids_BN, [horizons[0], *[max(horizons)] * (len(horizons) - 1)], tap)


class OpenNeighbours(Decoder):
    """Of a padded batch, the first and the last clip are open."""

    def _visible(self, horizons_BN, num_source, history):
        visible_BNM = super()._visible(horizons_BN, num_source, history)
        if visible_BNM.shape[0] > 1:
            visible_BNM[[0, -1], :, -num_source:] = True
        return visible_BNM


class VisiblePadding(Decoder):
    """The padding of shorter histories is attended to."""

    @staticmethod
    def _visible_rows(history, num_rows):
        whole = torch.full_like(history.lengths_B, history.ids_BH.shape[1])
        return Decoder._visible_rows(dataclasses.replace(history, lengths_B=whole), num_rows)


class OpenBlindRows(Decoder):
    """Rows that may read nothing read the first token."""

    def _visible(self, horizons_BN, num_source, history):
        return super()._visible(horizons_BN.clamp(min=1), num_source, history)


class OpenPrompt(Decoder):
    """The prompt reads all that is cached."""

    def prefill(self, cache, ids_BN, horizon, *, tap=None):
        return super().prefill(cache, ids_BN, cache.num_source if ids_BN.shape[1] > 1 or cache.num_rows == 0 else horizon, tap=tap)


class OneStepTooFar(Decoder):
    """One row of many reads one token too many."""

    def _visible(self, horizons_BN, num_source, history):
        horizons_BN = horizons_BN.clone()
        horizons_BN[:, 13:14] += 1
        return super()._visible(horizons_BN, num_source, history)


class EagerLength(Model):
    """The predicted length follows one feature of the first token past the buffer."""

    def predict_steps(self, window_TE, buffer, history=None):
        steps = super().predict_steps(window_TE, buffer, history)
        peeks = window_TE.shape[0] > buffer and float(window_TE[buffer, 0]) > 2.5
        return max(1, steps - 1) if peeks else steps


class PaddedHistoryLength(Model):
    """The length head pools the padding of histories."""

    def length_logits(self, source_BTE, lengths_B, history=None):
        if history is not None:
            full = torch.full_like(history.lengths_B, history.ids_BH.shape[1])
            history = dataclasses.replace(history, lengths_B=full)
        return super().length_logits(source_BTE, lengths_B, history)


class LateRuntime(Model):
    """From the third window on, a step reads one token more where it is at hand."""

    def open(self, schedule, **options):
        session = super().open(schedule, **options)
        step, arrivals = session.rows.step, session._context.input

        def eager(ids, horizon, tap=None):
            window = arrivals.window
            if window.index >= 2 and arrivals.queue.items and not window.complete:
                arrivals._take(arrivals.queue.items[0], window.arrived + 1)
            return step(ids, min(horizon + (window.index >= 2), window.arrived), tap)

        session.rows.step = eager
        return session


@pytest.mark.parametrize(
    "plant",
    [
        OtherStreamsKeys, LargestHorizon, OpenNeighbours, VisiblePadding, OpenBlindRows, OpenPrompt, OneStepTooFar,
        EagerLength, PaddedHistoryLength, LateRuntime,
    ],
    ids=lambda plant: plant.__name__,
)  # fmt: skip
def test_subtle_leaks_are_found(plant):
    leak = Leak("subtle", **({"decoder": plant} if issubclass(plant, Decoder) else {"model": plant}))
    schedule = PowerLaw(1.5, "floor") if plant is OpenBlindRows else PowerLaw(1)
    report = audit(leak.plant(Model.from_preset("tiny")), schedule)
    assert not report.passed


def test_the_same_model_without_the_leak_passes():
    for name in ("bidirectional", "segment"):  # the plants that change the config or the protocol
        honest = dataclasses.replace(preset("tiny").decoder, source_layers=LEAKS[name].source_layers)
        assert audit(Model.from_preset("tiny", decoder=honest), LEAKS[name].schedule, cuts=2).passed
    gated = VoiceLeak("an honest gate").audit(Model.from_preset("tiny"))
    assert gated.passed
    assert gated.steps_tested["voice gate"] > 50


@pytest.mark.parametrize("name", list(presets()))
@pytest.mark.parametrize("index", range(7))
def test_every_preset_and_schedule_passes(name, index):
    model = Model.from_preset(name)
    report = audit(model, default_schedules(model)[index], cuts=1, max_source=40, max_steps=10)
    assert report.passed, report.first
    assert report.probes > 5
    assert {"teacher-forced, batch", "incremental", "incremental, batch", "live"} <= set(report.steps_tested)


class OtherHead(Model):
    """The runtime forgets the head start, or counts it twice."""

    times = 0

    def open(self, schedule, **options):
        return super().open(PowerLaw(schedule.gamma_or_none, head=self.times * schedule.head), **options)


class TwiceHead(OtherHead):
    times = 2


@pytest.mark.parametrize("plant", [OtherHead, TwiceHead])
def test_a_runtime_with_another_head_start_is_found(plant):
    report = audit(Leak("live", model=plant).plant(Model.from_preset("tiny")), PowerLaw(0.5, head=3), cuts=1)
    assert {violation.path for violation in report.violations} == {"live"}


@pytest.mark.parametrize("schedule", [PowerLaw(0.5, head=3), PowerLaw(1, "floor", head=2), PowerLaw(1.5, head=40)], ids=str)
@pytest.mark.parametrize("length", ["none", "fix", "inf"])
def test_a_head_start_passes(schedule, length):
    report = audit(Model.from_preset("tiny", length=length, history=length == "inf"), schedule, cuts=3)
    assert report.passed, report.first
    assert report.schedule == str(schedule)


@pytest.mark.parametrize("length", ["none", "fix", "inf"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_every_kind_of_model_passes(length, norm):
    decoder = dataclasses.replace(preset("tiny").decoder, norm=norm, source_layers=1)
    model = Model.from_preset("tiny", decoder=decoder, length=length, history=length == "inf")
    for schedule in (PowerLaw(0.6), PowerLaw(1, head=3), WaitK(4, 0.9)):
        report = audit(model, schedule, cuts=3)
        assert report.passed, report.first


def test_every_step_can_be_tried():
    report = audit(Model.from_preset("tiny"), PowerLaw(1), cuts=1000)
    assert report.passed
    assert report.probes > 200


def test_the_report_says_what_was_done():
    report = audit(Model.from_preset("tiny"), PowerLaw(0.3), cuts=2, seed=5)
    record = json.loads(json.dumps(report.to_dict()))
    assert record["passed"] is True
    assert record["schedule"] == "gamma=0.3"
    assert record["seed"] == 5
    assert record["steps_tested"]["incremental"] == 32
    assert (record["window_tokens"], record["steps"]) == (24, 32)
    assert AuditReport(schedule="", seed=0, scale="window", window_tokens=1, steps=1).first is None
    leaky = LEAKS["decreasing"].audit(Model.from_preset("tiny"), cuts=1).to_dict()
    assert leaky["violations"][0]["size"] is None  # NaN is no JSON


def test_the_model_is_left_as_it_was():
    model = Model.from_preset("tiny").train()
    audit(model, PowerLaw(1), cuts=1)
    assert model.training


def test_misuse_is_one_clear_line():
    with pytest.raises(ZendayaError, match="the audit needs"):
        audit(Model.from_preset("tiny"), PowerLaw(1), max_source=5)
    with pytest.raises(ZendayaError, match="scale"):
        audit(Model.from_preset("tiny"), PowerLaw(1), scale="clip")


class Hesitant(Model):
    """Ends wherever it has read little of the window, so that it pauses before every word."""

    def open(self, schedule, **options):
        session = super().open(schedule, **options)
        step, choose, read = session.rows.step, session._context.rules.choose, []
        session.rows.step = lambda ids, horizon, tap=None: (read.append(horizon), step(ids, horizon, tap))[1]
        session._context.rules.choose = lambda logits_V, text, **_: (
            self.config.framing.end if read[-1] < 2 * len(text) + 5 else choose(logits_V, text)
        )
        return session


@pytest.mark.parametrize("schedule", [PowerLaw(0.5), PowerLaw(1.5), WaitK(2, 0.5)], ids=str)
def test_a_model_that_pauses_passes(schedule):
    config = dataclasses.replace(Model.from_preset("tiny").config, end_means_wait=True)
    report = audit(Hesitant(config).eval(), schedule, cuts=2)
    assert report.passed, report.first
