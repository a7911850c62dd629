"""Subtitles: any events give valid, monotone cues that never overlap, two lines of 42 at most, every letter once; read back by others."""

import html
import io
import subprocess
import sys
import unicodedata

import pytest
import srt
import webvtt
from hypothesis import given
from hypothesis import strategies as st

from zendaya.errors import SourceError
from zendaya.records import Event
from zendaya.runtime.subtitles import LINES, MIN_S, WIDTH, Cue, Cues, SubtitleFile, Subtitles, to_srt, to_vtt

LETTERS = st.characters(exclude_categories=("Cs",))
WORDS = st.sampled_from(
    [" the", " of", " extraordinary", "ly", ".", ",", " Yes.", " 7", "\n", " -->", " <b>", " &amp;", " x" * 30, "y" * 100, ""]
)
STEPS = st.lists(st.tuples(st.one_of(WORDS, st.text(LETTERS, max_size=12)), st.floats(0, 4), st.booleans()), max_size=60)


def cues_of(steps):
    cues, now_s, found = Cues(), 0.0, []
    for text, wait_s, last in steps:
        now_s += wait_s
        found += cues.add(text, now_s)
        if last:
            found += cues.part()
    return [*found, *cues.close()]


def letters(text):
    return "".join(letter for letter in text if not letter.isspace() and unicodedata.category(letter) != "Cc")


@given(STEPS)
def test_cues_are_monotone_and_small_and_hold_all_text_once(steps):
    found = cues_of(steps)
    end_s = 0.0
    for cue in found:
        assert end_s <= cue.start_s < cue.end_s
        end_s = cue.end_s
        assert 1 <= len(cue.lines) <= LINES
        assert all(1 <= len(line) <= WIDTH and line == line.strip() for line in cue.lines)
    assert letters("".join(line for cue in found for line in cue.lines)) == letters("".join(text for text, _, _ in steps))


@given(STEPS)
def test_another_parser_reads_back_the_same_vtt(steps):
    found = cues_of(steps)
    text = "WEBVTT\n\n" + "".join(to_vtt(cue, 0) for cue in found)
    read = list(webvtt.from_buffer(io.StringIO(text)))
    assert [c.start for c in read] == [clock(cue.start_s) for cue in found]
    assert [c.end for c in read] == [clock(cue.end_s) for cue in found]
    assert [[html.unescape(line) for line in c.lines] for c in read] == [list(cue.lines) for cue in found]


@given(STEPS)
def test_another_parser_reads_back_the_same_srt(steps):
    found = cues_of(steps)
    text = "".join(to_srt(cue, number) for number, cue in enumerate(found, start=1))
    read = list(srt.parse(text))
    assert [c.index for c in read] == list(range(1, len(found) + 1))
    assert [(c.start.total_seconds(), c.end.total_seconds()) for c in read] == [(cue.start_s, cue.end_s) for cue in found]
    assert [c.content.split("\n") for c in read] == [[line.replace("-->", "→") for line in cue.lines] for cue in found]


def clock(moment_s):
    ms = round(moment_s * 1000)
    return f"{ms // 3600000:02}:{ms // 60000 % 60:02}:{ms // 1000 % 60:02}.{ms % 1000:03}"


def say(text, pace_s=0.3, begin_s=0.0):
    return [(f" {word}", begin_s + number * pace_s) for number, word in enumerate(text.split(), start=1)]


def shown(pieces):
    cues = Cues()
    return [*(cue for text, at_s in pieces for cue in cues.add(text, at_s)), *cues.close()]


def test_sentences_end_cues_and_lines_are_alike():
    found = shown(say("We came to the river before it was light. Nobody had crossed it since the bridge fell in the winter."))
    assert [cue.lines for cue in found] == [
        ("We came to the river before it was light.",),
        ("Nobody had crossed it since", "the bridge fell in the winter."),
    ]
    assert [(cue.start_s, cue.end_s) for cue in found] == [(0.0, 2.7), (2.7, 6.0)]


def test_a_pause_ends_a_cue():
    first, second = shown([*say("so I waited"), *say("and waited", begin_s=9.0)])
    assert (first.lines, second.lines) == (("so I waited",), ("and waited",))
    assert first.end_s < 2
    assert 8.5 <= second.start_s <= 9.0


def test_a_long_sentence_breaks_at_a_clause_and_leaves_no_stump():
    found = shown(say("When the last of the boats had gone out, and the harbour lay empty again, we sat down on the wall and ate", 0.2))
    assert found[0].lines[-1].endswith("again,")
    assert all(len(" ".join(cue.lines)) > 10 for cue in found)


def test_a_short_cue_is_shown_long_enough_and_the_next_waits():
    first, second = shown([(" Yes.", 0.2), *say("That is what I have been saying all along.", begin_s=1.7)])
    assert first.end_s - first.start_s >= MIN_S
    assert second.start_s >= first.end_s


def event(text, last=False):
    return Event(0, 1, 5, text, 1, 1, 1, last)


def test_the_file_is_valid_after_every_event(tmp_path):
    vtt, plain = tmp_path / "a.vtt", tmp_path / "a.srt"
    subtitles = Subtitles(SubtitleFile(vtt, "vtt"), SubtitleFile(plain, "srt"))
    assert not vtt.exists()
    counts = []
    for number in range(200):
        subtitles.add(event(" word" if number % 9 else " end."), 0.3 * number)
        if vtt.exists():
            counts.append(len(webvtt.read(str(vtt))))
            assert counts[-1] == len(list(srt.parse(plain.read_text(encoding="utf-8"))))
    subtitles.close()
    assert sorted(counts) == counts
    assert counts[0] == 1
    text = " ".join(" ".join(cue.lines) for cue in webvtt.read(str(vtt)))
    assert len(text.split()) == 200


def test_nothing_to_say_is_a_valid_file(tmp_path):
    subtitles = Subtitles(SubtitleFile(tmp_path / "a.vtt", "vtt"), SubtitleFile(tmp_path / "a.srt", "srt"))
    subtitles.close()
    assert len(webvtt.read(str(tmp_path / "a.vtt"))) == 0
    assert (tmp_path / "a.srt").read_bytes() == b""


def test_a_window_ends_a_word():
    found = shown_windows(["one", "two"])
    assert found[0].lines == ("one two",)


def shown_windows(texts):
    cues = Cues()
    return [*(cue for text in texts for cue in (*cues.add(text, 0.5), *cues.part())), *cues.close()]


@pytest.mark.parametrize("name", ["no/such/folder/a.vtt", ".", "file/a.vtt"])
def test_an_unwritable_path_is_refused_at_once(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="cannot be written"):
        SubtitleFile(tmp_path / name, "vtt")


def test_a_full_disk_is_one_error():
    file = SubtitleFile("/dev/full", "vtt")
    with pytest.raises(SourceError, match="No space left"):
        file.write(Cue(0, 1, ("a",)))


def test_subtitles_cost_no_torch():
    code = "import sys, zendaya.runtime.subtitles; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
