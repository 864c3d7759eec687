"""A chat in a process of its own: in a pipe, on a terminal, on a dumb one, and after a restart."""

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_chat import FakeTokenizer, answer_to

from kvarn.folders import cache_folder
from kvarn.serve.chat.chat import surroundings
from kvarn.serve.chat.keyboard import EditingReader, PipeReader, PlainReader
from kvarn.serve.chat.screen import PlainScreen, RichScreen
from kvarn.serve.cli import main
from kvarn.serve.sessions import load_session

FAKE = Path(__file__).resolve().parents[2] / "support" / "fake_chat.py"
DEADLINE = 20  # seconds for whatever a test waits for
HI = "<user>hi\n<assistant>"
ESCAPE = re.compile(r"\x1b[\[(=>?][0-9;?]*[a-zA-Z]?|\x1b")


def environment(**changes: str) -> dict[str, str]:
    quiet = {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FAKE.parent)}
    return {name: x for name, x in {**os.environ, **quiet, **changes}.items() if name != "NO_COLOR" or name in changes}


class Tty:
    """A child on a terminal of its own. `written` is all that it wrote."""

    def __init__(self, *args: str, **changes: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, str(FAKE), *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(**changes),
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.written = ""
        self._read_to = 0

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, pattern: str) -> str:
        """Read until something new matches; returns what was new, without escape codes."""
        deadline = time.monotonic() + DEADLINE
        while True:
            fresh = ESCAPE.sub("", self.written[self._read_to :])
            if re.search(pattern, fresh, re.DOTALL):
                self._read_to = len(self.written)
                return fresh
            left = deadline - time.monotonic()
            assert left > 0, f"no {pattern!r} in {fresh!r}"
            if select.select([self.master], [], [], left)[0]:
                self.written += os.read(self.master, 65536).decode(errors="replace")

    def end(self) -> int:
        """Read until the child has ended; its exit code."""
        deadline = time.monotonic() + DEADLINE
        with contextlib.suppress(OSError):  # EIO: nobody has the other side open
            while time.monotonic() < deadline and select.select([self.master], [], [], DEADLINE)[0]:
                part = os.read(self.master, 65536)
                if not part:
                    break
                self.written += part.decode(errors="replace")
        return self.process.wait(DEADLINE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE)
        os.close(self.master)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextlib.contextmanager
def tty(*args: str, **changes: str) -> Iterator[Tty]:
    made = Tty(*args, **changes)
    try:
        yield made
    finally:
        made.close()


def test_a_terminal_takes_lines_several_lines_ctrl_c_retry_and_ctrl_d() -> None:
    with tty("--max-tokens", "5", "--session", "s") as child:
        child.until(">>>")
        child.type("hi\r")
        child.until(r"max_tokens is 5.*>>>")
        child.type("one\x1b\rtwo\\\rthree\r")  # Alt-Enter, and a backslash
        child.until(r"max_tokens is 5.*>>>")
        child.type("\x1b[200~four\rfive\x1b[201~")  # pasted
        child.type("\r")
        child.until(r"max_tokens is 5.*>>>")
        child.type("/retry\r")
        child.until(r"temperature is 0.*max_tokens is 5.*>>>")
        child.type("half a line\x03")
        child.until(r"Ctrl-D or /bye leaves.*>>>")
        child.type("\x04")
        assert child.end() == 0
    said = HI
    for turn in ("one\ntwo\nthree", "four\nfive"):
        said += answer_to(said, 5) + f"\n<user>{turn}\n<assistant>"
    session = load_session("s", "t")
    assert session is not None
    assert len(session.turns) == 6
    assert FakeTokenizer().decode(session.tokens) == said + answer_to(said, 5)
    history = cache_folder() / "chat_history"
    assert history.stat().st_mode & 0o77 == 0
    assert "+two" in history.read_text()
    assert "\x1b]8;" not in child.written


def test_ctrl_c_stops_an_answer_and_the_history_comes_back() -> None:
    with tty("--max-tokens", "900", "--seconds", "0.01", "--session", "s") as child:
        child.until(">>>")
        child.type("hi\r")
        child.until(re.escape(answer_to(HI, 3).split()[0]))
        child.type("\x03")
        child.until(r"what was said so far stays.*>>>")
        child.type("\x04")
        assert child.end() == 0
    session = load_session("s", "t")
    assert session is not None
    assert 0 < len(session.tokens) - session.turns[1] < 900
    with tty("--max-tokens", "3") as again:
        again.until(">>>")
        again.type("\x1b[A")
        again.until("hi")
        again.type("\r")
        again.until(r"max_tokens is 3.*>>>")
        again.type("/bye\r")
        assert again.end() == 0


@pytest.mark.parametrize("changes", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_a_dumb_terminal_gets_no_escape_code(changes: Mapping[str, str]) -> None:
    with tty("--max-tokens", "300", **changes) as child:
        child.until(">>>")
        child.type("hi\\\n")
        child.until(r"\.\.\. ")
        child.type("there\n")
        child.until(r"max_tokens is 300.*>>>")
        child.type("\x03")
        child.until(r"Ctrl-D or /bye leaves.*>>>")
        child.type("\x04")
        assert child.end() == 0
    answer = answer_to("<user>hi\nthere\n<assistant>", 300)
    assert "\x1b" in answer, "the model does try"
    assert "\x1b" not in child.written
    assert answer.replace("\x1b", "␛").splitlines()[1] in child.written


def test_a_pipe_gets_the_answers_alone_as_they_are() -> None:
    lines = "hi\n\n/set max_tokens 300\ngo on\\\n/nothing\n//x\n"
    run = subprocess.run(
        [sys.executable, str(FAKE), "--max-tokens", "5"],
        input=lines.encode(),
        capture_output=True,
        env=environment(),
        check=False,
    )
    said, answers = HI, []
    for following, count in (("\n<user>go on\\\n<assistant>", 5), ("\n<user>/x\n<assistant>", 300), ("", 300)):
        answers.append(answer_to(said, count))
        said += answers[-1] + following
    assert run.stdout.decode() == "".join(text + ("" if text.endswith("\n") else "\n") for text in answers)
    assert b"\x1b" in run.stdout
    assert b"no command /nothing" in run.stderr
    assert b"1 of 5 lines could not be done" in run.stderr


def test_a_pipe_that_is_not_utf8_is_said() -> None:
    run = subprocess.run(
        [sys.executable, str(FAKE)], input=b"\xff\n", capture_output=True, env=environment(PYTHONUTF8="1"), check=False
    )
    assert run.returncode != 0
    assert b"not UTF-8" in run.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stdin", "stdout", "env", "screen", "reader"),
    [
        (io.StringIO, io.StringIO, {"TERM": "xterm"}, PlainScreen, PipeReader),
        (io.StringIO, Terminal, {"TERM": "xterm"}, PlainScreen, PipeReader),
        (Terminal, io.StringIO, {"TERM": "xterm"}, PlainScreen, PlainReader),
        (Terminal, Terminal, {}, PlainScreen, PlainReader),
        (Terminal, Terminal, {"TERM": "dumb"}, PlainScreen, PlainReader),
        (Terminal, Terminal, {"TERM": "xterm", "NO_COLOR": "1"}, PlainScreen, PlainReader),
        (Terminal, Terminal, {"TERM": "xterm", "NO_COLOR": ""}, RichScreen, EditingReader),
    ],
)
def test_the_streams_decide_the_screen_and_the_reader(
    stdin: type[io.StringIO],
    stdout: type[io.StringIO],
    env: Mapping[str, str],
    screen: type[object],
    reader: type[object],
    tmp_path: Path,
) -> None:
    found = surroundings(stdin(), stdout(), io.StringIO(), env, tmp_path / "history")
    assert (type(found[0]), type(found[1])) == (screen, reader)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "no model; name one"),
        (["demo", "--json"], "chat prints no JSON object"),
        (["demo", "--temp", "-1"], "temperature -1.0"),
        (["--url", "http://127.0.0.1:1", "--kv-cache-dtype", "exact"], "--kv-cache-dtype is the server's choice"),
        (["--url", "http://127.0.0.1:1", "--session", "x"], "--session keeps token ids"),
        (["--url", "nowhere"], "is no server's address"),
    ],
)
def test_options_that_do_not_fit_are_refused(args: list[str], text: str) -> None:
    result = CliRunner().invoke(main, ["chat", *args])
    assert result.exit_code == 2
    assert text in result.stderr
    assert result.stdout == ""


def test_a_session_goes_on_after_a_restart_without_reading_again(demo_dir: Path) -> None:
    def chat(lines: str, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvarn.serve.cli", "chat", str(demo_dir), "--session", "s", "-n", "4", *args]
        return subprocess.run(command, input=lines, capture_output=True, text=True, env=environment(), check=True)

    first = chat("Remember these words: " + "apple river stone cloud " * 65 + "\n", "--system", "Be brief.")
    assert first.stdout.strip()
    second = chat("And now?\n/stats\n/undo\n/undo\n/show\n")
    assert second.stdout.strip()
    cached = re.search(r"prompt: (\d+) tokens .* (\d+) of them cached", second.stderr)
    assert cached is not None
    assert int(cached[2]) > 128
    assert "dropped: And now?" in second.stderr
    assert "dropped: Remember these words: apple" in second.stderr
    assert "system: Be brief." in second.stderr
    refused = CliRunner().invoke(main, ["chat", str(demo_dir), "--session", "../s"])
    assert refused.exit_code == 2


def test_sigint_in_a_pipe_ends_the_chat_and_keeps_what_was_said() -> None:
    child = subprocess.Popen(
        [sys.executable, str(FAKE), "--max-tokens", "900", "--seconds", "0.01", "--session", "s"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"hi\nnever\n")
    child.stdin.close()
    child.stdout.read(3)
    child.send_signal(signal.SIGINT)
    child.stdout.read()
    assert child.wait(DEADLINE) != 0
    child.stdout.close()
    session = load_session("s", "t")
    assert session is not None
    assert len(session.turns) == 2
