"""The dial in seconds: what a lag picks, what a file must hold, and whose it is."""

import dataclasses
import json

import pytest

from zendaya import DecodeOptions, Model, PowerLaw
from zendaya.encoders.whisper import WhisperBlocks
from zendaya.errors import CheckpointError, ConfigError
from zendaya.nn.checkpoint import WEIGHTS, read_checkpoint, stated_digest
from zendaya.nn.presets import preset
from zendaya.runtime.frontier import FRONTIER, DialChoice, choose_setting, frontier_path, read_frontier, undominated
from zendaya.runtime.setting import LiveSetting

POINTS = (
    ("gamma=2.0,head=1200,hold=12;block_s=0.32", 0.68, 14.0), ("gamma=1.0,head=25", 0.95, 11.0), ("gamma=1.0,head=50;block_s=1", 1.9, 9.0),
    ("gamma=0.5", 2.75, 8.0), ("gamma=0.0;window_s=20", 4.88, 7.5),
)  # fmt: skip


@pytest.fixture
def frontier(frontier_of):
    return frontier_of(*POINTS)


@pytest.fixture
def folder(tmp_path, frontier):
    """A checkpoint with its frontier."""
    Model.from_preset("tiny", seed=0).save_pretrained(tmp_path)
    dataclasses.replace(frontier, model_digest=stated_digest(tmp_path / WEIGHTS)).write(tmp_path / FRONTIER)
    return tmp_path


@pytest.mark.parametrize(("lag_s", "place"), [(0.68, 0), (0.94, 0), (0.95, 1), (1.0, 1), (2.0, 2), (4.0, 3), (100.0, 4)])
def test_a_lag_picks_the_best_setting_within_it(frontier, lag_s, place):
    assert frontier.at(lag_s) == frontier.points[place]


@pytest.mark.parametrize("lag_s", [0.5, 0.0, -1.0, float("nan"), float("inf")])
def test_a_lag_out_of_reach_says_what_there_is(frontier, lag_s):
    with pytest.raises(ConfigError, match=r"^--lag: this model reaches 0.7 … 4.9 s: got .*; ask for --lag 0.7$"):
        frontier.at(lag_s)
    assert frontier.at(0.7) == frontier.points[0]  # as it says


def test_what_is_shown_was_measured_on_test(frontier):
    point = frontier.at(1.0)
    assert point.seconds == "1.1 s"
    assert point.figures == {"lag_s": 1.05, "lag_p90_s": 1.575, "wer": 12.0, "at_s": 0.95, "setting": "gamma=1.0,head=25"}
    assert all(frontier.at(point.figures["at_s"]) == point for point in frontier.points)


def test_dominated_points_are_left_out(frontier_of):
    points = [
        frontier_of(point).points[0] for point in (*POINTS, ("gamma=0.7", 1.0, 11.0), ("gamma=0.9", 0.95, 12.0), ("gamma=0.1", 5.0, 7.5))
    ]
    kept = undominated(reversed(points))
    assert [point.setting for point in kept] == [setting for setting, _, _ in POINTS]
    for one in points:
        beaten = any(other.chosen.lag_s <= one.chosen.lag_s and other.chosen.wer <= one.chosen.wer for other in points if other != one)
        assert beaten == (one not in kept)
    with pytest.raises(ConfigError, match="none of them worse than another in both"):
        frontier_of(*POINTS, ("gamma=1.5", 5.0, 8.0))
    with pytest.raises(ConfigError, match="from fast to accurate"):
        frontier_of(*reversed(POINTS))


def test_a_policy_is_not_on_the_frontier(frontier_of):
    with pytest.raises(ConfigError, match="expected a schedule, as gamma=1,head=25: got the policy 'alignatt=25'"):
        frontier_of(("alignatt=25", 1.0, 9.0))
    with pytest.raises(ConfigError, match="precision is chosen by machine: leave it out of 'gamma=1;precision=int8'"):
        frontier_of(("gamma=1;precision=int8", 1.0, 9.0))


def test_delays_go_from_fast_to_accurate(frontier, frontier_of):
    assert [frontier.points.index(frontier.named(name)) for name in ("minimal", "low", "medium", "high", "xhigh")] == [0, 1, 2, 3, 4]
    single = frontier_of(POINTS[1])
    assert single.named("minimal") == single.named("xhigh") == single.points[0]


def test_neighbours_end_at_the_ends(frontier):
    first, second, *_, last = frontier.points
    assert (frontier.beside(first, 1), frontier.beside(second, -1), frontier.beside(first, -1)) == (second, first, first)
    assert frontier.beside(last, 1) == last


def test_one_function_chooses(frontier, frontier_of):
    assert choose_setting(None).schedule == PowerLaw(0.5)
    assert choose_setting(frontier) == DialChoice.of(frontier.points[1])
    assert choose_setting(frontier, lag_s=2.0).point == frontier.points[2]
    assert choose_setting(frontier, schedule=PowerLaw(0.3)) == DialChoice(LiveSetting(PowerLaw(0.3), {}, {}))
    slow = frontier_of(POINTS[2], POINTS[3])
    assert choose_setting(slow).point == slow.points[0]  # 1 s is out of reach: the closest
    with pytest.raises(ConfigError, match="lag_s: this model has no measured frontier: give gamma, or measure one"):
        choose_setting(None, lag_s=1.0, option="lag_s")


def test_models_without_a_frontier_have_defaults():
    fixed = preset("tiny")
    sliding = dataclasses.replace(fixed, overlap_tokens=8, history=False)
    assert choose_setting(None, config=fixed).schedule == PowerLaw(0.5)
    assert choose_setting(None, config=sliding).schedule == PowerLaw(1, head=fixed.window_tokens, hold=25)
    assert choose_setting(None, config=sliding, schedule=PowerLaw(0.5)).schedule == PowerLaw(0.5)


def test_nobody_waits_for_a_whole_recording(frontier):
    sliding = dataclasses.replace(preset("tiny"), overlap_tokens=8, history=False)
    assert choose_setting(frontier, whole=True).point == frontier.points[-1]
    assert choose_setting(frontier, lag_s=2.0, whole=True).point == frontier.points[2]
    assert choose_setting(frontier, schedule=PowerLaw(1), whole=True).schedule == PowerLaw(1)
    assert choose_setting(None, config=sliding, whole=True).schedule == PowerLaw(0)


def test_a_file_is_read_as_it_was_written(folder, frontier):
    assert read_frontier(folder).points == frontier.points
    assert frontier_path(folder) == folder / FRONTIER
    assert frontier_path("tiny.en-dial").name == "tiny.en-dial.frontier.json"
    assert frontier_path("someone/model") is None
    assert read_frontier("someone/model") is None
    (folder / FRONTIER).unlink()
    assert read_frontier(folder) is None


def test_other_weights_are_refused(folder):
    Model.from_preset("tiny", seed=1).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"measured for the weights \w{16}: got \w{16} in model.safetensors; make it again"):
        read_frontier(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record.pop("model_digest"), "expected a field model_digest, which is missing"),
        (lambda record: record.update(points=[]), "points: expected at least one: got none"),
        (lambda record: record.update(gamma=1), "unknown field gamma"),
        (lambda record: record["points"][0]["chosen"].update(lag_s="fast"), "expected float: got 'fast'"),
        (lambda record: record["points"][0]["chosen"].update(wer=-1.0), "wer: expected a number from 0.0 to"),
        (lambda record: record["points"][0].update(setting="quickly"), "not a schedule: 'quickly'"),
        (lambda record: record["points"].reverse(), "from fast to accurate"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(folder, change, words):
    path = folder / FRONTIER
    record = json.loads(path.read_text(encoding="utf-8"))
    change(record)
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_frontier(folder)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_torn_file_is_refused(folder):
    (folder / FRONTIER).write_bytes((folder / FRONTIER).read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"frontier\.json: expected JSON"):
        read_frontier(folder)


def test_the_stated_digest_is_the_verified_one(folder):
    assert stated_digest(folder / WEIGHTS) == read_checkpoint(folder / WEIGHTS)[1]["sha256"]
    (folder / "other").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match="expected a checkpoint of this library"):
        stated_digest(folder / "other")


def test_a_setting_gives_options_and_encoder(random_whisper):
    setting = LiveSetting.parse("gamma=1;window_s=10;voice=off;block_s=0.5")
    assert setting.options() == DecodeOptions(schedule=PowerLaw(1), window_s=10.0, voice="off")
    given = setting.options(window_s=None, voice="gate", patience_s=2.0)
    assert (given.window_s, given.voice, given.patience_s) == (10.0, "gate", 2.0)
    encoder = WhisperBlocks(random_whisper, "random", block_s=1.0)
    assert setting.encoder_from(encoder).block == 25
    assert LiveSetting.parse("gamma=1").encoder_from(encoder) is encoder
