"""benchmarks/live.py: its choice of chapters, its results that are used again, its tables; and what may be trained on."""

import collections
import hashlib
import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from zendaya.data.corpora.registry import read
from zendaya.errors import ConfigError
from zendaya.evaluation import live_results
from zendaya.evaluation.live import Played
from zendaya.evaluation.metrics.speech import WrittenWord
from zendaya.evaluation.streams import TEST_12, Noise, SoundStream
from zendaya.research import recipes
from zendaya.training import adapt

CLEAN = "librispeech_clean"


@pytest.fixture
def live(monkeypatch):
    path = Path(__file__).parents[2] / "benchmarks" / "live.py"
    specification = importlib.util.spec_from_file_location("benchmark_live", path)
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "benchmark_live", module)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path):
    """Two chapters of the valid split, four utterances of 6 s each, four words in each; the recordings are not there."""
    lines, times = [], []
    for number in range(16):
        name = f"{number // 8}-{number // 4}-{number % 4:04}"
        lines.append({"id": name, "split": "valid", "dur": 6.0, "text": "ONCE UPON A TIME", "audio": f"{name}.opus"})
        times.append({"id": name, "words": [["once", 1.0, 2.0], ["upon", 2.0, 3.0], ["a", 3.0, 4.0], ["time", 4.0, 5.0]]})
    for file, records in (("manifest.jsonl", lines), ("align_valid_test.jsonl", times)):
        (tmp_path / file).write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return tmp_path


class Stub:
    """A player that hears every word 1 s after its end, but one per utterance under some settings; it writes `You` in noise."""

    name, digest = "stub", "d1"
    encoder = types.SimpleNamespace(traits=types.SimpleNamespace(name="stub encoder"))

    def __init__(self, streams):
        self.streams, self.played = streams, []

    def open(self, setting):
        if setting.encoder:
            raise ConfigError(f"no setting {setting.encoder}")

    def play(self, setting, sound):
        (stream,) = set(sound)
        self.played.append((stream.name, str(setting)))
        words, at_s = [], 0.0
        for part in stream.parts:
            spoken = ["once", "upon", "a", "time"][: 3 if "alignatt" in str(setting) else 4]
            if not hasattr(part, "id"):
                spoken = ["You"]
            words += [WrittenWord(word, at_s + n + 3, at_s + n + 3.5, at_s + n + 2) for n, word in enumerate(spoken)]
            at_s += part.duration_s
        return Played(words=tuple(words), edges_s=(5.5,), sound_s=at_s, cpu_s=0.1 * at_s, decoder_rows=10, num_tokens=5)


@pytest.fixture
def stub(live, monkeypatch):
    """The script with players that decode nothing: a stream is its own sound."""
    player = Stub(live)
    offline = types.SimpleNamespace(play=lambda sound: player.play("offline alignatt", sound))
    monkeypatch.setattr(live_results, "live_player", lambda name: player)
    monkeypatch.setattr(live_results, "offline_player", lambda: offline)
    monkeypatch.setattr(SoundStream, "sound", lambda stream, folder: iter([stream]))
    return player


def run(live, folder, capsys, *words):
    live.main([str(folder), "--split", "valid", "--out", str(folder / "out"), *words])
    return capsys.readouterr().out


SETTINGS = ("--setting", "gamma=0.5", "--setting", "alignatt=25,chunk=100")


def test_figures_and_signature(live, folder, stub, capsys):
    found = json.loads(run(live, folder, capsys, *SETTINGS, "--json"))
    first, second, offline = found["rows"]
    assert (first["wer"]["value"], second["wer"]["value"], offline["wer"]["value"]) == (0.0, 25.0, 25.0)
    assert (second["substitutions"], second["deletions"], second["insertions"]) == (0, 16, 0)
    assert (first["ratio"]["value"], second["ratio"]["value"], offline["ratio"]["value"]) == (0.0, 1.0, 1.0)
    assert (first["lag_s"]["value"], first["lag_50_s"], first["aware_lag_s"]["value"]) == (1.0, 1.0, 1.5)
    assert (first["cpu"]["value"], first["rows_per_token"]["value"]) == (0.1, 2.0)
    assert second["edge_wer"]["value"] == 100.0  # within a second of 5.5 is `time` alone, which is lost
    assert second["minus_first"]["wer"]["value"] == 25.0
    signature = found["signature"]
    assert signature["data_digest"] == read("librispeech", folder).digest
    assert (signature["model_digest"], signature["split"], signature["seed"]) == ("d1", "valid", 0)
    assert signature["settings"] == ["gamma=0.5", "alignatt=25,chunk=100"]


def test_results_are_used_again(live, folder, stub, capsys):
    table = run(live, folder, capsys, *SETTINGS)
    num_played = len(stub.played)
    assert num_played == 2 * 4 + 16  # two settings on four chapters, and each utterance offline
    assert run(live, folder, capsys, *SETTINGS) == table
    assert run(live, folder, capsys, "--table") == table
    assert len(stub.played) == num_played
    assert (folder / "out" / "log.txt").read_text(encoding="utf-8").count("s of sound") == 12
    stub.digest = "d2"
    run(live, folder, capsys, "--setting", "gamma=0.5")
    assert len(stub.played) == num_played + 4  # another model plays anew, the offline one does not
    with pytest.raises(ConfigError, match=r"results of one model on this data: got stub .d1., stub .d2."):
        run(live, folder, capsys, "--table")
    assert run(live, folder, capsys, "--table", "--model", "d1") == table


def test_a_line_that_was_cut_off_is_made_again(live, folder, stub, capsys):
    table, path = run(live, folder, capsys, *SETTINGS), folder / "out" / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-200])
    assert run(live, folder, capsys, *SETTINGS) == table
    assert len(stub.played) == 24 + 1


def test_an_interrupted_run_keeps_what_is_done(live, folder, stub, capsys, monkeypatch):
    play, played = stub.play, []

    def stop(setting, sound):
        if len(played) == 5:
            raise KeyboardInterrupt
        played.append(setting)
        return play(setting, sound)

    monkeypatch.setattr(stub, "play", stop)
    with pytest.raises(KeyboardInterrupt):
        run(live, folder, capsys, *SETTINGS)
    monkeypatch.undo()
    assert len((folder / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()) == 2  # the chapter in work is lost


def test_noise(live, folder, stub, capsys):
    found = json.loads(run(live, folder, capsys, "--noise", "20", "--setting", "gamma=0.5", "--json"))["noise"]
    assert [(row["noise"].split(",")[0], row["words_in_noise"], row["lost"]) for row in found] == [
        ("silence", 1, 0), ("pink", 1, 0), ("hum", 1, 0), ("music", 1, 0), ("room", 10, 0),
    ]  # fmt: skip
    assert found[-1]["words"] == 40
    assert [row["cpu"] for row in found] == [0.1] * 5
    assert "14 words in all in 2 min without speech; 0 words lost that" in run(live, folder, capsys, "--noise", "20", "--table")


def test_words_lost_after_noise_that_offline_writes(live, folder, stub, capsys, monkeypatch):
    offline = types.SimpleNamespace(play=lambda sound: stub.play("offline", sound))  # it writes every word
    monkeypatch.setattr(live_results, "offline_player", lambda: offline)
    found = json.loads(run(live, folder, capsys, "--noise", "20", "--setting", "alignatt=25", "--json"))["noise"]
    assert [(row["lost"], row["lost_beyond_offline"]) for row in found] == [(1, 1)] * 4 + [(10, 10)]
    assert "14 words lost that offline writes" in run(live, folder, capsys, "--noise", "20", "--table")


def test_one_long_stream_against_many(live, folder, stub, capsys):
    (found,) = json.loads(run(live, folder, capsys, "--joined", "--setting", "alignatt=25", "--json"))["joined"]
    assert (found["joined_wer"], found["own_wer"], found["ratio"]["value"]) == (25.0, 25.0, 1.0)


def test_whole_utterances(live, folder, stub, capsys):
    found = json.loads(run(live, folder, capsys, "--whole", "--json"))
    assert found["signature"]["settings"] == ["gamma=0.0;window_s=30.0"]
    assert (len(found["chapters"]), found["signature"]["num_streams"]) == (4, 16)


@pytest.fixture
def accents(tmp_path):
    """Two speakers of speechocean762, three utterances of 6 s each, without word times; the recordings are not there."""
    folder = tmp_path / "accents"
    folder.mkdir()
    names = [(f"{speaker}{number}", f"{speaker:04}") for speaker in (1, 2) for number in range(3)]
    common = {"split": "valid", "dur": 6.0, "text": "ONCE UPON A TIME"}
    lines = [json.dumps({"id": name, "speaker": speaker, "audio": f"{name}.opus", **common}) for name, speaker in names]
    (folder / "manifest.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_another_corpus_by_speaker_without_word_times(live, accents, stub, capsys):
    words = ("--corpus", "speechocean762", *SETTINGS)
    found = json.loads(run(live, accents, capsys, *words, "--json"))
    assert found["chapters"] == ["0001", "0002"]
    assert sorted(stub.played)[0] == ("0001", "alignatt=25,chunk=100")
    assert [row["wer"]["value"] for row in found["rows"]] == [0.0, 25.0, 25.0]
    assert [row["lag_s"]["value"] for row in found["rows"]] == [None] * 3
    assert "note: the corpus has no word times: no lag" in run(live, accents, capsys, *words, "--table")


def test_other_speech_against_librispeech(live, folder, accents, stub, capsys):
    words = ("--corpus", "speechocean762", "--against", str(folder), "--against-split", "valid", "--setting", "alignatt=25")
    found = json.loads(run(live, accents, capsys, *words, "--json"))
    (row,) = found["against"]
    assert (row["ratio"]["value"], row["ratio_against"]["value"], row["quotient"]["value"]) == (1.0, 1.0, 1.0)
    assert (row["num_groups"], row["num_groups_against"]) == (2, 4)
    num_played = len(stub.played)
    assert num_played == 2 + 6 + 4 + 16  # the speakers, their utterances offline, the chapters, theirs
    assert "1.00 [1.00, 1.00] times as much" in run(live, accents, capsys, *words, "--table")
    assert read("librispeech", folder).digest[:16] in found["signature"]["against"]
    assert len(stub.played) == num_played
    with pytest.raises(ConfigError, match="--against compares word errors on two corpora: it does not go with --noise"):
        run(live, accents, capsys, *words, "--noise")


@pytest.mark.parametrize("kind", ["silence", "pink", "hum", "music", "room"])
def test_noise_is_the_same_for_a_seed(kind):
    one, other = Noise(kind, 2.0, 1).samples(), Noise(kind, 2.0, 1).samples()
    assert np.array_equal(one, other)
    assert (one.dtype, one.size) == (np.float32, 32_000)
    assert np.abs(one).max() < 1
    assert (one.std() > 0.001) == (kind != "silence")


def test_bad_choices_are_refused(live, folder, stub, capsys):
    with pytest.raises(ConfigError, match="--chapters must be a number from 1 to 4, or all: got '5'"):
        run(live, folder, capsys, "--chapters", "5")
    with pytest.raises(ConfigError, match="no utterance of the split 'dev'"):
        run(live, folder, capsys, "--split", "dev")
    with pytest.raises(ConfigError, match="results of one model"):
        run(live, folder, capsys, "--table")
    with pytest.raises(ConfigError, match="no setting"):
        run(live, folder, capsys, "--setting", "gamma=0.5", "--setting", "gamma=0.5;blok=1")
    assert not stub.played


# The published data.


def test_the_fixed_chapters_follow_their_rule(data):
    there = collections.defaultdict(float)
    for clip in read("librispeech", data / CLEAN).usable:
        if clip.split == "test":
            there[clip.stream] += clip.duration_s
    first = dict[str, str]()
    for name in sorted(there, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        if 200 <= there[name] <= 300:
            first.setdefault(name.partition("-")[0], name)
    assert len(there) == 87
    assert tuple(first.values())[:12] == TEST_12
    assert 44 * 60 < sum(there[name] for name in TEST_12) < 48 * 60


def test_nothing_of_test_clean_is_trained_on(data, tmp_path, monkeypatch):
    recipe = recipes.recipe("adapt-tiny.en")
    folder = data / recipe.folder
    records = [json.loads(line) for line in (folder / "manifest.jsonl").read_text(encoding="utf-8").splitlines()]
    tested = {record["id"] for record in records if record["subset"] == "test-clean"}
    assert len(tested) == 2620
    assert not tested & {record["id"] for record in records if record["split"] in ("train", "valid")}
    read_ids = set()
    monkeypatch.setattr(adapt, "_sound", lambda folder, clip: read_ids.add(clip.id))
    monkeypatch.setattr(adapt, "read_labels", lambda path: {})
    monkeypatch.setattr(adapt, "examples", lambda *_: {"train": [1], "valid": [1]})
    monkeypatch.setattr(adapt, "make_labels", lambda *_, **options: None)
    monkeypatch.setattr(adapt, "_runs", lambda clips: iter(()))
    corpora = {"librispeech": folder, **{name: data / name for name in recipe.more}}
    adapt.adapt(corpora, labels=tmp_path, config=recipe.adapt)
    more = [clip for name in recipe.more for clip in read(name, data / name).usable]
    taken = {record["id"] for record in records if record["split"] in ("train", "valid")}
    assert read_ids == taken | {clip.id for clip in more if clip.split == "train"}
    assert not read_ids & (tested | {clip.id for clip in more if clip.split == "test"})


def test_a_real_chapter_of_twenty_seconds(live, data, tmp_path, capsys):
    wanted = [f"1272-128104-{number:04}" for number in range(3)]
    for file in ("manifest.jsonl", "align_valid_test.jsonl"):
        lines = (data / CLEAN / file).read_text(encoding="utf-8").splitlines()
        (tmp_path / file).write_text("\n".join(line for line in lines if json.loads(line)["id"] in wanted), encoding="utf-8")
    (tmp_path / "opus").symlink_to((data / CLEAN / "opus").resolve())
    words = [str(tmp_path), "--split", "valid", "--out", str(tmp_path / "out"), "--setting", "gamma=0;window_s=10", "--setting", "gamma=1"]
    live.main(words)
    printed = capsys.readouterr().out
    live.main([*words, "--table"])
    assert capsys.readouterr().out == printed
    live.main([*words, "--table", "--json"])
    slow, fast, offline = json.loads(capsys.readouterr().out)["rows"]
    assert 0 < fast["lag_s"]["value"] < slow["lag_s"]["value"]
    assert max(slow["wer"]["value"], offline["wer"]["value"]) < 20
    assert slow["edge_words"] > 0 < slow["cpu"]["value"]
    assert slow["aware_lag_s"]["value"] > slow["lag_s"]["value"]
