"""The terminal: what a reader sees, as an emulator shows it; keys; and the terminal as it was, however the program ends."""

import fcntl
import io
import os
import pty
import random
import select
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time

import pyte
import pytest

from zendaya.cli.terminal import Screen, Status, keys, turned, uninterrupted
from zendaya.records import Event


class Terminal(io.StringIO):
    """A stream that says it is a terminal, drawn by an emulator of `lines` by `columns`."""

    def __init__(self, columns=40, lines=10):
        super().__init__()
        self.screen = pyte.Screen(columns, lines)
        self.feed = pyte.Stream(self.screen).feed

    def isatty(self):
        return True

    def write(self, text):
        self.feed(text.replace("\n", "\r\n"))
        return len(text)

    @property
    def shown(self):
        return [line.rstrip() for line in self.screen.display]


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr("zendaya.cli.terminal._width", lambda stream: 40)
    monkeypatch.setattr("zendaya.cli.terminal.REDRAW_S", 0.0)


def test_captions_wrap_between_words_above_the_status_line(narrow):
    terminal = Terminal()
    screen = Screen(terminal, terminal)
    for number, piece in enumerate(
        [" The", " quick", " brown", " fox", " jump", "ed", " over", " the", " astonish", "ingly", " lazy", " dog."]
    ):
        screen.write(piece)
        screen.show(lambda number=number: f"status {number}")
        lines = [line for line in terminal.shown if line]
        assert lines[-1] == f"status {number}"
        assert sum("status" in line for line in lines) == 1
    assert terminal.shown[:3] == ["The quick brown fox jumped over the", "astonishingly lazy dog.", "status 11"]
    screen.close()
    assert [line for line in terminal.shown if line] == ["The quick brown fox jumped over the", "astonishingly lazy dog."]


def test_on_a_full_screen_nothing_is_lost_or_doubled(narrow):
    chosen = random.Random(0)
    words = [f"{'abcdefghij'[: chosen.randint(1, 10)]}{number}" for number in range(200)]
    terminal = Terminal(lines=8)
    terminal.screen = pyte.HistoryScreen(40, 8, history=1000)
    terminal.feed = pyte.Stream(terminal.screen).feed
    screen = Screen(terminal, terminal)
    for number, word in enumerate(words):
        screen.write(f" {word[:2]}")
        screen.write(word[2:])
        screen.show(lambda number=number: f"<{number}>")
        if number % 17 == 16:
            screen.end_line()
    screen.close()
    past = ["".join(line[column].data for column in range(40)) for line in terminal.screen.history.top]
    assert " ".join([*past, *terminal.screen.display]).split() == words


def test_a_pipe_gets_plain_text_a_line_a_window_and_no_status():
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(out, err)
    for piece in (" One", " two", "."):
        screen.write(piece)
        screen.show(lambda: "status")
    screen.end_line()
    screen.end_line()  # a silent window leaves no empty line
    screen.write(" Three")
    screen.close()
    assert out.getvalue() == "One two.\nThree\n"
    assert err.getvalue() == ""


def test_a_status_alone_is_one_line(narrow):
    out, err = io.StringIO(), Terminal()
    screen = Screen(out, err)
    for number in range(3):
        screen.write(" word")
        screen.show(lambda number=number: f"status {number} " + "x" * 60)
    assert [line for line in err.shown if line] == ["status 2 " + "x" * 30]
    screen.close()
    assert not any(err.shown)
    assert out.getvalue() == "word word word\n"


def test_whole_lines_and_a_status_share_a_terminal(narrow):
    terminal = Terminal()
    screen = Screen(terminal, terminal, plain=True)
    for number in range(3):
        screen.print(f'{{"event": {number}}}')
        screen.show(lambda number=number: f"status {number}")
    assert [line for line in terminal.shown if line] == ['{"event": 0}', '{"event": 1}', '{"event": 2}', "status 2"]
    screen.close()
    assert terminal.shown[3] == ""


def test_a_model_does_not_control_the_terminal(narrow):
    terminal = Terminal()
    screen = Screen(terminal, terminal)
    screen.write(" safe\x1b[2J\x07 text")
    assert terminal.shown[0] == "safe[2J text"


def test_the_status_says_the_dial_lag_exposure_and_window():
    status = Status(500, 50.0)
    assert status.line("gamma=0.5", keys=True) == "[ γ 0.5 ] │ listening, q ends"
    event = Event(0, 3, 7, " a", 200, 200, 30, False, arrival_s=6.0, emission_s=6.25, read_s=4.0, spoken_s=2.0)
    status.add(event)
    status.add(Event(0, 4, -1, "", 0, 0, 30, False, schedule="gamma=1", read_s=4.0, spoken_s=2.0))
    assert status.line("gamma=1") == "γ 1 │ lag 4.2 s: policy 4.0, compute 0.25 │ exposure 40% │ window 1: 4.0/10 s"
    assert status.line("full").startswith("full │")


def test_the_dial_moves_along_its_settings_and_stops_at_ends():
    gamma, seen = 0.5, []
    for key in "]]]]]]" + "[" * 14:
        gamma = turned(gamma, key)
        seen.append(gamma)
    assert max(seen) == 2.0
    assert seen[-1] == 0.0
    assert turned(0.45, "]") == 0.5


def test_there_are_no_keys_where_there_is_no_terminal():
    with keys(io.StringIO("]]]")) as ask:
        assert ask() == ""
    with open(os.devnull) as file, keys(file) as ask:  # noqa: PTH123
        assert ask() == ""


CHILD = """
import sys, time
from zendaya.cli.terminal import keys
with keys(sys.stdin) as ask:
    print("ready", flush=True)
    while True:
        for key in ask():
            print(f"<{key}>", flush=True)
            if key == "x":
                raise ZeroDivisionError
            if key == "q":
                sys.exit(3)
        time.sleep(0.01)
"""


class Child:
    """A program on a pseudo-terminal of its own."""

    def __init__(self, *command):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.execv(command[0], command)
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.shown = b""

    def until(self, text, timeout_s=60):
        end_s = time.monotonic() + timeout_s
        while text.encode() not in self.shown:
            assert time.monotonic() < end_s, self.shown.decode(errors="replace")
            if select.select([self.terminal], [], [], 0.1)[0]:
                self.shown += os.read(self.terminal, 65536)

    def press(self, text):
        os.write(self.terminal, text.encode())

    @property
    def modes(self):
        return termios.tcgetattr(self.terminal)[3]


@pytest.mark.parametrize("way", ["q", "x", "ctrl-c", "term", "hup"])
def test_the_terminal_is_as_it_was_however_the_program_ends(way, tmp_path):
    # A shell of its own holds the terminal open, so that its modes can be looked at afterwards.
    (tmp_path / "child.py").write_text(CHILD)
    child = Child("/bin/sh", "-c", f"trap : HUP TERM INT; {sys.executable} {tmp_path / 'child.py'}; echo ended $?; read line")
    child.until("ready")
    assert not child.modes & termios.ICANON
    child.press("]")
    child.until("<]>")
    number = {"term": signal.SIGTERM, "hup": signal.SIGHUP}.get(way)
    if number is None:
        child.press({"ctrl-c": "\x03"}.get(way, way))
    else:
        found = subprocess.run(["pgrep", "-P", str(child.pid)], capture_output=True, text=True, check=True).stdout.split()
        os.kill(int(found[0]), number)
    child.until("ended")
    assert child.modes & termios.ICANON
    assert child.modes & termios.ECHO
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    os.close(child.terminal)


def test_arrows_and_function_keys_turn_nothing(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    child = Child(sys.executable, str(tmp_path / "child.py"))
    child.until("ready")
    child.press("\x1b[A\x1b[1;5C\x1bOP\x1b[15~")
    for part in ("\x1b", "[", "B"):  # a slow line
        child.press(part)
        time.sleep(0.1)
    child.press("]")
    child.until("<]>")
    child.press("q")
    os.waitpid(child.pid, 0)
    assert b"<[>" not in child.shown
    os.close(child.terminal)


def test_a_suspended_program_restores_the_terminal_and_resumes(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    script = textwrap.dedent(f"""
        set -m
        {sys.executable} {tmp_path / "child.py"}
        echo stopped $?
        read line
        fg
    """)
    child = Child("/bin/bash", "--norc", "-c", script)
    child.until("ready")
    child.press("\x1a")
    child.until("stopped 148")
    assert child.modes & termios.ICANON
    child.press("\n")
    time.sleep(0.5)
    child.press("]")
    child.until("<]>")
    assert not child.modes & termios.ICANON
    child.press("q")
    os.waitpid(child.pid, 0)
    os.close(child.terminal)


def test_ctrl_c_between_the_screen_and_the_files_waits_for_both():
    done = list[str]()

    def write():
        with uninterrupted():
            done.append("shown")
            os.kill(os.getpid(), signal.SIGINT)
            done.append("written")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert done == ["shown", "written"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
