"""`zendaya frontier`: settings chosen on one split and reported on another, resumed, into one file."""

import json
import types

import pytest

from zendaya.cli.frontier import frontier as command
from zendaya.cli.frontier import print_frontier
from zendaya.data.corpora.registry import read
from zendaya.errors import ConfigError
from zendaya.evaluation import live_results
from zendaya.evaluation.frontier import grid, make_frontier
from zendaya.evaluation.live import Played
from zendaya.evaluation.metrics.speech import WrittenWord
from zendaya.evaluation.options import FrontierOptions
from zendaya.evaluation.streams import SoundStream
from zendaya.nn.checkpoint import WEIGHTS, stated_digest
from zendaya.nn.model import Model
from zendaya.runtime.frontier import FRONTIER, read_frontier
from zendaya.runtime.setting import LiveSetting

WORDS = ("once", "upon", "a", "time")
GAMMAS = ("gamma=0.2", "gamma=0.5", "gamma=1", "gamma=1.5")


class Stub:
    """A player whose lag falls with γ; it loses a word per utterance from γ = 0.5 on, and all but one at γ = 1.5."""

    name, digest = "stub", "d1"
    encoder = types.SimpleNamespace(traits=types.SimpleNamespace(name="stub encoder"))

    def __init__(self):
        self.played = []

    def open(self, setting):
        if setting.encoder:
            raise ConfigError(f"no setting {setting.encoder}")

    def play(self, setting, sound):
        (stream,) = set(sound)
        self.played.append((stream.name, str(setting)))
        gamma = 0.5 if setting == "offline" else setting.schedule.gamma
        lag_s = {0.2: 3.0, 0.5: 2.0, 1: 2.0, 1.5: 0.5}[gamma] + 0.25 * (stream.parts[0].split == "test")
        kept = {0.2: 4, 0.5: 3, 1: 2, 1.5: 1}[gamma]
        words, at_s = [], 0.0
        for part in stream.parts:
            words += [WrittenWord(word, at_s + n + 2 + lag_s, at_s + n + 2 + lag_s, at_s + n + 2) for n, word in enumerate(WORDS[:kept])]
            at_s += part.duration_s
        return Played(words=tuple(words), edges_s=(), sound_s=at_s, cpu_s=0.1, decoder_rows=10, num_tokens=5)


@pytest.fixture
def player(monkeypatch):
    """Players that decode nothing: a stream is its own sound."""
    player = Stub()
    monkeypatch.setattr(live_results, "live_player", lambda name: player)
    monkeypatch.setattr(live_results, "offline_player", lambda: types.SimpleNamespace(play=lambda sound: player.play("offline", sound)))
    monkeypatch.setattr(SoundStream, "sound", lambda stream, folder: iter([stream]))
    return player


@pytest.fixture
def model(tmp_path):
    Model.from_preset("tiny", seed=0).save_pretrained(tmp_path / "small")
    return tmp_path / "small"


@pytest.fixture
def folder(tmp_path):
    """Two chapters per split, two utterances of 6 s each."""
    lines, times = [], []
    for number in range(8):
        name = f"{number // 4}-{number // 2}-{number % 2:04}"
        lines.append({"id": name, "split": ["valid", "test"][number // 4], "dur": 6.0, "text": "ONCE UPON A TIME", "audio": f"{name}.opus"})
        times.append({"id": name, "words": [[word, n + 1.0, n + 2.0] for n, word in enumerate(WORDS)]})
    (tmp_path / "corpus").mkdir()
    for file, records in (("manifest.jsonl", lines), ("align_valid_test.jsonl", times)):
        (tmp_path / "corpus" / file).write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return tmp_path / "corpus"


@pytest.fixture
def options(tmp_path):
    def make(**given):
        return FrontierOptions(**{"settings": GAMMAS, "results": tmp_path / "results", **given})

    return make


def test_chosen_on_one_split_and_reported_on_another(model, folder, player, options):
    found, path = make_frontier(str(model), folder, options(report_name="LibriSpeech test-clean"))
    assert path == model / FRONTIER
    assert read_frontier(model) == found
    assert [point.setting for point in found.points] == ["gamma=1.5", "gamma=0.5", "gamma=0.2"]  # gamma=1 is as slow, and worse
    assert [(point.chosen.lag_s, point.chosen.lag_p90_s, point.chosen.wer, point.chosen.ratio) for point in found.points] == [
        (0.5, 0.5, 75.0, 3.0), (2.0, 2.0, 25.0, 1.0), (3.0, 3.0, 0.0, 0.0),
    ]  # fmt: skip
    assert [point.reported.lag_s for point in found.points] == [0.75, 2.25, 3.25]
    assert (found.chosen_on.name, found.reported_on.name) == ("librispeech valid", "LibriSpeech test-clean")
    assert (found.reported_on.num_streams, found.reported_on.data_digest) == (2, read("librispeech", folder).digest)
    assert (found.model, found.model_digest) == ("small", stated_digest(model / WEIGHTS))


def test_what_is_beaten_is_never_played_on_test(model, folder, player, options):
    make_frontier(str(model), folder, options())
    tested = {setting for name, setting in player.played if name.startswith("1-")}
    assert "gamma=1.0" not in tested
    assert {"gamma=0.2", "gamma=0.5", "gamma=1.5"} < tested


def test_a_second_run_plays_what_is_new(model, folder, player, options, tmp_path):
    first, _ = make_frontier(str(model), folder, options(settings=GAMMAS[:2]))
    played = len(player.played)
    again, _ = make_frontier(str(model), folder, options(settings=GAMMAS[:2]))
    assert (again, len(player.played)) == (first, played)
    more, path = make_frontier(str(model), folder, options(out=tmp_path / "more.json"))
    assert (len(more.points), path.is_file()) == (3, True)
    assert len(player.played) == played + 2 * 2 + 2  # two settings on two chapters of valid, and one of them on test
    assert "valid: 4 settings on 2 chapters" in (tmp_path / "results" / "log.txt").read_text(encoding="utf-8")


def test_no_ratio_where_offline_made_no_error(model, folder, player, options, monkeypatch, capsys):
    perfect = types.SimpleNamespace(play=lambda sound: player.play(LiveSetting.parse("gamma=0.2"), sound))
    monkeypatch.setattr(live_results, "offline_player", lambda: perfect)
    found, _ = make_frontier(str(model), folder, options())
    assert [point.reported.ratio for point in found.points] == [None, None, None]
    assert read_frontier(model) == found
    print_frontier(found)
    assert "75.00          –" in capsys.readouterr().out


def test_fewer_chapters(model, folder, player, options):
    found, _ = make_frontier(str(model), folder, options(chapters="1"))
    assert (found.chosen_on.num_streams, found.reported_on.num_streams) == (1, 1)
    found, _ = make_frontier(str(model), folder, options(chapters="12"))
    assert (found.chosen_on.num_streams, found.reported_on.num_streams) == (2, 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"settings": ("alignatt=25",)}, "--setting: a frontier holds schedules"),
        ({"settings": ("gamma=1;blok=2",)}, "no setting"),
        ({"split_choose": "dev"}, "no utterance of the split 'dev'"),
        ({"split_choose": "test"}, "expected two splits: got test twice"),
        ({"chapters": "0"}, "--chapters: expected a number of at least 1, or all: got '0'"),
    ],
)
def test_bad_choices_are_refused(model, folder, player, options, given, words):
    with pytest.raises(ConfigError, match=words):
        make_frontier(str(model), folder, options(**given))
    assert not player.played


def test_places_that_cannot_be_used_are_refused(model, folder, player, options, tmp_path):
    with pytest.raises(ConfigError, match="its weights are not here"):
        make_frontier("someone/model", folder, options())
    with pytest.raises(ConfigError, match="cannot be written; give --out a file in an existing folder"):
        make_frontier(str(model), folder, options(out=tmp_path / "nowhere" / "file.json"))
    assert not player.played


def test_the_grid_is_of_schedules_on_small_blocks(frontier_of):
    settings = grid(Model.from_preset("tiny").config)
    for setting in settings:
        frontier_of((setting, 1.0, 5.0))  # refuses a policy
    assert len(set(settings)) == len(settings)
    assert any("hold" in setting and "block_s=0.32" in setting for setting in settings)


def test_the_command_prints_both_splits(model, folder, player, options, tmp_path, capsys):
    command(model=str(model), folder=folder, settings=list(GAMMAS), results=tmp_path / "results")
    printed = capsys.readouterr()
    assert f"written: {model / FRONTIER}" in printed.err
    assert "gamma=1.5   0.75    0.75  75.00       3.00              0.50  75.00" in printed.out
    print_frontier(read_frontier(model))
    assert capsys.readouterr().out == printed.out
