import dataclasses
import json

import pytest

from zendaya import Model, PowerLaw, WaitK, ZendayaError
from zendaya.audit import AuditReport, audit, default_schedules
from zendaya.audit.leaks import LEAKS
from zendaya.model import preset, presets

# On which path each planted leak must show.
FOUND_ON = {
    "history": "teacher-forced, history",
    "decreasing": "schedule",
    "softmax": "teacher-forced",
    "length": "length head",
    "segment": "live",
    "bidirectional": "teacher-forced",
    "padding": "teacher-forced, batch",
    "cache": "incremental",
}


@pytest.mark.parametrize("name", LEAKS)
def test_each_planted_leak_is_found(name):
    report = LEAKS[name].audit(Model.from_preset("tiny"), cuts=2)
    assert not report.passed
    assert report.first.path == FOUND_ON[name]
    assert report.first.step >= 1
    assert report.first.source_index >= 1


@pytest.mark.parametrize("name", ["decreasing", "length", "segment"])
def test_leaks_of_the_runtime_show_live_too(name):
    assert "live" in {violation.path for violation in LEAKS[name].audit(Model.from_preset("tiny"), cuts=2).violations}


def test_a_decreasing_schedule_shows_in_the_outputs_not_only_in_its_numbers():
    paths = {violation.path for violation in LEAKS["decreasing"].audit(Model.from_preset("tiny"), cuts=2).violations}
    assert {"schedule", "teacher-forced", "incremental, batch", "live"} <= paths


def test_the_same_model_without_the_leak_passes():
    for name in ("bidirectional", "segment"):  # the plants that change the config or the protocol
        honest = dataclasses.replace(preset("tiny").decoder, source_layers=LEAKS[name].source_layers)
        assert audit(Model.from_preset("tiny", decoder=honest), LEAKS[name].schedule, cuts=2).passed


@pytest.mark.parametrize("name", list(presets()))
@pytest.mark.parametrize("index", range(6))
def test_every_preset_and_schedule_passes(name, index):
    model = Model.from_preset(name)
    report = audit(model, default_schedules(model)[index], cuts=1, max_source=40, max_steps=10)
    assert report.passed, report.first
    assert report.probes > 5
    assert {"teacher-forced, batch", "incremental", "incremental, batch", "live"} <= set(report.steps_tested)


@pytest.mark.parametrize("length", ["none", "fix", "inf"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_every_kind_of_model_passes(length, norm):
    decoder = dataclasses.replace(preset("tiny").decoder, norm=norm, source_layers=1)
    model = Model.from_preset("tiny", decoder=decoder, length=length, history=length == "inf")
    for schedule in (PowerLaw(0.6), WaitK(4, 0.9)):
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
    assert AuditReport(schedule="", seed=0, scale="window").first is None


def test_misuse_is_one_clear_line():
    with pytest.raises(ZendayaError, match="window of more than"):
        audit(Model.from_preset("tiny"), PowerLaw(1), max_source=5)
    with pytest.raises(ZendayaError, match="scale"):
        audit(Model.from_preset("tiny"), PowerLaw(1), scale="clip")
