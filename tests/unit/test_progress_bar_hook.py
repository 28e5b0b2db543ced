"""ProgressBarHook: what it shows and when; lines where there is no terminal, and a bar in a real one."""

from __future__ import annotations

import errno
import io
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time

import jax.numpy as jnp
import pytest
import toy
from fake_session import FakeSession

import monsess as ms
from monsess.testing import FakeClock

LINE = re.compile(r"step (\d+)")

SCRIPT = """
import os, signal, sys, time
import monsess as ms
ms.testing.emulate_devices(2)
import jax.numpy as jnp
from monsess.log import logger

@ms.train_step
def step(state):
    return state + 1, {"loss": 1 / (state + 1)}

hooks = [ms.ProgressBarHook(refresh_secs=0.05, line_secs=0.2), ms.StopAtStepHook(last_step=LAST)]
with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=hooks, log_step_count_steps=None) as sess:
    while not sess.should_stop():
        sess.run(step)
        time.sleep(0.02)
        if sess.global_step == 20:
            logger.info("a line of the log")
            BODY
"""


@pytest.fixture
def clock():
    with FakeClock() as clock:
        yield clock


def shown(lines):
    return [line for line in lines() if LINE.match(line)]


class TestLines:
    """Where there is no terminal."""

    def run(self, session, clock, runs, seconds=1.0, **outputs):
        for _ in range(runs):
            clock.advance(seconds)
            session.run(**{"loss": 1.0 / (session.global_step + 1), **outputs})
            session.finish()

    def test_one_line_every_so_many_seconds(self, clock, lines):
        session = FakeSession(ms.ProgressBarHook(line_secs=10))
        session.last_step = 100
        self.run(session, clock, 35)
        assert shown(lines) == [
            "step 1/100 (1.0 %), loss=1",
            "step 12/100 (12.0 %), 1 steps/s, 0:01:28 left, loss=0.08333",
            "step 23/100 (23.0 %), 1 steps/s, 0:01:17 left, loss=0.04348",
            "step 34/100 (34.0 %), 1 steps/s, 0:01:06 left, loss=0.02941",
        ]

    def test_fetches_only_for_a_line(self, clock):
        session = FakeSession(ms.ProgressBarHook(line_secs=10))
        self.run(session, clock, 30)
        assert sum(args[0] is not None for args in session.fetched) == 3

    def test_values_that_have_not_arrived_hold_nobody(self, clock, lines):
        session = FakeSession(ms.ProgressBarHook(line_secs=10))
        for _ in range(5):
            clock.advance(20)
            session.run(loss=2.0)
        assert shown(lines) == []
        session.finish()
        session.run(loss=3.0)
        assert shown(lines) == ["step 1, loss=2"]  # the step that the values are of

    def test_total_of_its_own_or_none(self, clock, lines):
        session = FakeSession(ms.ProgressBarHook(total=50, line_secs=1))
        session.last_step = 100
        self.run(session, clock, 2)
        assert shown(lines)[0] == "step 1/50 (2.0 %), loss=1"
        self.run(FakeSession(ms.ProgressBarHook(line_secs=1)), clock, 2)
        assert shown(lines)[0] == "step 1, loss=1"

    def test_values_by_name_label_and_function(self, clock, lines):
        hook = ms.ProgressBarHook({"error": "loss", "rate": lambda state, outputs: outputs["lr"] * 10}, line_secs=1)
        self.run(FakeSession(hook), clock, 2, lr=0.5)
        assert shown(lines)[0] == "step 1, error=1, rate=5"
        self.run(FakeSession(ms.ProgressBarHook("lr", line_secs=1)), clock, 2, lr=0.25)
        assert shown(lines)[0] == "step 1, lr=0.25"

    def test_without_a_loss_there_is_none(self, clock, lines):
        session = FakeSession(ms.ProgressBarHook(line_secs=1))
        for _ in range(2):
            session.run(other=1.0)
            session.finish()
            clock.advance(2)
        assert shown(lines) == ["step 1"]

    def test_no_single_number(self):
        session = FakeSession(ms.ProgressBarHook("loss"))
        with pytest.raises(ValueError, match="'loss' is no single number"):
            session.run(loss=jnp.ones(3))

    @pytest.mark.parametrize("values", [3, [3], lambda state, outputs: 1, {"a": ["loss", "lr"]}])
    def test_values_that_are_none(self, values):
        with pytest.raises((ValueError, TypeError)):
            ms.ProgressBarHook(values)

    def test_the_end_is_shown(self, clock, lines):
        session = FakeSession(ms.ProgressBarHook(line_secs=100))
        session.last_step = 5
        self.run(session, clock, 5)
        session.end()
        assert shown(lines)[-1] == "step 5/5 (100.0 %), 1 steps/s, loss=0.2"

    def test_the_end_of_a_session_without_a_step(self, clock, lines):
        FakeSession(ms.ProgressBarHook()).end()
        assert shown(lines) == []

    def test_chief_alone_shows(self, clock, lines):
        session = FakeSession(ms.ProgressBarHook(line_secs=1), chief=False, processes=2)
        self.run(session, clock, 5)
        session.end()
        assert shown(lines) == []
        assert all(args == [None] for args in session.fetched)

    def test_resumed_run_begins_where_it_was(self, clock, lines):
        session = FakeSession(ms.ProgressBarHook(line_secs=10), step=40)
        session.last_step = 60
        self.run(session, clock, 13)
        assert shown(lines)[-1].startswith("step 52/60 (86.7 %), 1 steps/s, 0:00:08 left")
        session.recover(40)
        self.run(session, clock, 2)
        assert shown(lines) == ["step 41/60 (68.3 %), loss=0.02439"]

    def test_values_are_names(self):
        with pytest.raises(ValueError, match="invalid values: 5"):
            ms.ProgressBarHook(5)

    @pytest.mark.parametrize("argument", ["refresh_secs", "line_secs", "total"])
    def test_numbers_are_checked(self, argument):
        with pytest.raises(ValueError, match=argument):
            ms.ProgressBarHook(**{argument: 0})

    def test_training_is_the_same(self):
        with ms.MonitoredTrainingSession(
            toy.init_fn, data=toy.batches(6), hooks=[ms.ProgressBarHook(line_secs=0.001)], log_step_count_steps=None
        ) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
        toy.assert_same_bits(sess.state_copy(), toy.straight(6))

    def test_a_run_that_fails_and_is_caught_does_not_stop_it(self, clock, lines):
        hooks = [ms.ProgressBarHook(line_secs=10)]
        shown = []
        with ms.MonitoredTrainingSession(toy.init_fn, hooks=hooks, max_in_flight=1, log_step_count_steps=None) as sess:
            for number in range(6):
                clock.advance(10)
                with pytest.raises(ms.BatchError):
                    sess.run(toy.train, {"x": jnp.ones((3, 1))})
                sess.run(toy.train, toy.batch(number))
                shown += [line for line in lines() if line.startswith("step ")]
        assert len(shown) >= 3

    def test_the_log_is_left_as_it_was(self):
        before = list(logging.getLogger("monsess").handlers)
        with ms.MonitoredTrainingSession(toy.init_fn, data=toy.batches(2), hooks=[ms.ProgressBarHook()]) as sess:
            sess.run(toy.train)
        assert logging.getLogger("monsess").handlers == before


class Screen:
    """What a terminal shows: as much of one as a bar needs."""

    def __init__(self):
        self.rows, self.column = [""], 0

    def feed(self, text):
        for part in re.split(r"(\r|\n|\x1b\[[0-9;?]*[A-Za-z])", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.rows.append("")
                self.column = 0
            elif part == "\x1b[A":
                raise AssertionError("the bar has more than one line")
            elif part.startswith("\x1b"):
                raise AssertionError(f"unexpected sequence {part!r}")
            else:
                row = self.rows[-1].ljust(self.column)
                self.rows[-1] = row[: self.column] + part + row[self.column + len(part) :]
                self.column += len(part)


def in_terminal(script, columns=100, signalled=None):
    """Run a script in a pseudo-terminal; its exit status, what the screen shows, and whether the settings changed."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(leader, (24, columns))
    before = termios.tcgetattr(follower)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script], stdin=follower, stdout=follower, stderr=follower
    )
    screen, raw = Screen(), b""
    watchdog = threading.Timer(90, process.kill)
    watchdog.start()
    try:
        while process.poll() is None or select.select([leader], [], [], 0)[0]:
            if select.select([leader], [], [], 0.1)[0]:
                raw += os.read(leader, 65536)
            if signalled is not None and re.search(rb" [2-9]\d/", raw):  # the bar need not show every step
                process.send_signal(signalled)
                signalled = None
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
    after = termios.tcgetattr(follower)
    os.close(leader)
    os.close(follower)
    text = raw.decode()
    screen.feed(text)
    return process.returncode, [row.rstrip() for row in screen.rows], after == before, text


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


class TestAlmostTerminal:
    """In this process, on something that says it is a terminal."""

    def test_error_is_printed_below(self, monkeypatch):
        class Fails(ms.SessionRunHook):
            def after_run(self, run_context, run_values):
                if run_context.global_step == 4:
                    raise ValueError("planned")

        monkeypatch.setattr(sys, "stderr", stream := FakeTerminal())
        with pytest.raises(ValueError, match="planned"):
            with ms.MonitoredTrainingSession(
                toy.init_fn, data=toy.batches(6), hooks=[ms.ProgressBarHook(refresh_secs=0.001), Fails()]
            ) as sess:
                while not sess.should_stop():
                    sess.run(toy.train)
        screen = Screen()
        screen.feed(stream.getvalue() + "Traceback")
        (bar,) = [index for index, row in enumerate(screen.rows) if "step/s" in row]
        assert screen.rows[-1] == "Traceback"
        assert bar < len(screen.rows) - 1
        assert "loss=" in screen.rows[bar]

    @pytest.mark.parametrize("kind", ["no isatty", "closed", "full", "full at once", "narrow characters"])
    def test_whatever_stderr_is_the_training_goes_on(self, monkeypatch, kind):
        """A bar is worth a warning, and never a training."""

        class Writes:
            def write(self, text):
                return len(text)

            def flush(self):
                pass

        class Full(FakeTerminal):
            room = 0 if kind == "full at once" else 2

            def write(self, text):
                self.room -= bool(text)
                if self.room < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(text)

        class Narrow(FakeTerminal):
            encoding = "ascii"

            def write(self, text):
                text.encode("ascii")
                return super().write(text)

        closed = io.StringIO()
        closed.close()
        stream = {"no isatty": Writes(), "closed": closed, "narrow characters": Narrow()}.get(kind, Full())
        monkeypatch.setattr(sys, "stderr", stream)
        handlers = list(logging.getLogger("monsess").handlers)
        bar = ms.ProgressBarHook({"\u03bb": "loss"}, refresh_secs=0.001)
        with ms.MonitoredTrainingSession(
            toy.init_fn, data=toy.batches(6), hooks=[bar], log_step_count_steps=None
        ) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
        toy.assert_same_bits(sess.state_copy(), toy.straight(6))
        assert logging.getLogger("monsess").handlers == handlers

    def test_without_tqdm_there_are_lines(self, monkeypatch, clock, lines):
        monkeypatch.setattr(sys, "stderr", FakeTerminal())
        for name in ("tqdm", "tqdm.std"):
            monkeypatch.setitem(sys.modules, name, None)
        session = FakeSession(ms.ProgressBarHook())
        for _ in range(3):
            session.run(loss=1.0)
            session.finish()
            clock.advance(40)
        said = lines()
        assert said[0] == 'The progress is shown line by line: a bar needs tqdm. pip install "monsess[tqdm]"'
        assert said[1:] == ["step 1, loss=1"]


class TestTerminal:
    """In a real pseudo-terminal, in a process of its own."""

    def test_bar(self):
        code, rows, same, raw = in_terminal(SCRIPT.replace("LAST", "60").replace("BODY", ""))
        assert code == 0, raw
        assert same
        assert raw.count("\r") > 5  # it moved
        bars = [row for row in rows if "%|" in row]
        assert len(bars) == 1, rows
        assert re.match(r"100%\|.*\| 60/60 \[\d\d:\d\d<00:00, +[\d.]+step/s, loss=0.01667\]$", bars[0]), bars
        assert next(row for row in rows if row.endswith("a line of the log"))[:2].isdigit()  # on a line of its own
        assert rows.index(bars[0]) > [row.endswith("a line of the log") for row in rows].index(True)
        assert rows[-1] == ""  # the cursor stands below

    def test_sigterm_leaves_the_terminal_clean(self):
        script = SCRIPT.replace("LAST", "2000").replace("BODY", "")
        code, rows, same, raw = in_terminal(script, signalled=signal.SIGTERM)
        assert code == 143, raw
        assert same
        bars = [row for row in rows if "%|" in row]
        assert len(bars) == 1, rows
        assert "\x1b" not in raw  # no cursor was hidden
        assert rows[-1] == ""
        assert any("stopping cleanly" in row for row in rows[: rows.index(bars[0])]), rows
        assert "stopped: SIGTERM received" in rows[-2], rows

    def test_piped(self):
        begun = time.monotonic()
        script = SCRIPT.replace("LAST", "60").replace("BODY", "")
        ended = subprocess.run(
            [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=90
        )
        seconds = time.monotonic() - begun
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout == ""
        assert "\r" not in ended.stderr
        assert "\x1b" not in ended.stderr
        lines = [line for line in ended.stderr.splitlines() if re.search(r"INFO step \d+/60", line)]
        assert 2 <= len(lines) <= 3 + seconds / 0.2
        assert re.search(r"step 60/60 \(100.0 %\), [\d.]+ steps/s, loss=0.01667$", lines[-1])
