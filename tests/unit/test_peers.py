"""What a process makes of what the others tell, without threads, devices or other processes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

import monsess as ms
from monsess import last_words
from monsess import peers as module
from monsess.peers import Peers
from monsess.process_name import this_process

FAILURE, STALL = 10.0, 100.0


class Exit(Exception):
    """The process would have ended here."""


class Channel:
    """The messages of all processes in one dict."""

    def __init__(self, index: int, messages: dict[str, str], count: int) -> None:
        self.index = index
        self.count = count
        self.messages = messages

    def post(self, key: str, value: str) -> None:
        self.messages[key] = value

    def under(self, key: str) -> dict[str, str]:
        return {name.removeprefix(f"{key}/"): v for name, v in self.messages.items() if name.startswith(f"{key}/")}


class Ends:
    """Instead of the end of this process."""

    def __init__(self) -> None:
        self.armed: list[BaseException] = []

    def arm(self, peers: Peers, error: BaseException) -> None:
        self.armed.append(error)

    def __call__(self) -> None:
        raise Exit


@pytest.fixture
def now(monkeypatch):
    """The time, in a list of one, that `monsess.peers` reads."""
    moment = [1000.0]

    class Time:
        monotonic = staticmethod(lambda: moment[0])
        sleep = staticmethod(lambda seconds: moment.__setitem__(0, moment[0] + seconds))
        time = staticmethod(lambda: moment[0])

    monkeypatch.setattr(module, "time", Time)
    return moment


@pytest.fixture
def ends(monkeypatch):
    """What the process is armed with."""
    ends = Ends()
    monkeypatch.setattr(module, "end_without_barrier", ends)
    return ends


@pytest.fixture
def job(monkeypatch, now, ends):
    """Makes processes that have told something."""

    monkeypatch.setattr(module, "those_who_left", dict)

    def make(count: int, present: int | None = None) -> list[Peers]:
        messages: dict[str, str] = {}
        made = [Peers(Channel(index, messages, count), FAILURE, STALL) for index in range(present or count)]
        for one in made:
            one._tell()
        return made

    return make


def beat(*living):
    """One round of all watch threads."""
    for one in living:
        one._tell()
    return [watch(one) for one in living]


def watch(one):
    """What `Peers._watch` does after it has told; returns the trouble that it has found."""
    found = one._look()
    if found is not None and one._trouble is None and one._ends_at is None:
        one._trouble = found
        one._ends_at = module.time.monotonic() + 0.8 * FAILURE
    one._end_if_due()
    return found


def silence(now, living, seconds):
    """The others tell nothing for a while; what each of the living has found first."""
    found = [None] * len(living)
    until = now[0] + seconds
    while now[0] < until:
        now[0] += 0.25
        found = [old or new for old, new in zip(found, beat(*living), strict=True)]
    return found


def test_an_error_that_the_watch_knows_already_leaves_the_hooks_their_time(job, now, ends):
    one, other = job(2)
    other.report(ValueError("planned"))
    (trouble,) = beat(one)
    assert isinstance(trouble, ms.PeerFailedError)
    now[0] += 1.5
    one.report(trouble)  # it reached the training thread through the saver, not through check()
    now[0] += 1.0  # longer than a training thread that is stuck is given
    beat(one)
    now[0] += 0.8 * FAILURE
    with pytest.raises(Exit):
        beat(one)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(7)])
def test_an_interrupt_after_a_failure_has_its_own_exit_status(job, ends, error):
    one, other = job(2)
    other.report(ValueError("planned"))
    beat(one)
    one.report(error)
    assert ends.armed[-1] is error


def test_who_is_dead_is_counted_once_and_told_to_all(job, now, monkeypatch):
    living = job(4)[:3]
    told = silence(now, living, 7.0)
    assert [str(one).partition(" s;")[0] for one in told] == ["Process 3 has been silent for 6"] * 3
    silence(now, living[:1], 1.0)
    assert [one._dead for one in living] == [{3}] * 3
    monkeypatch.setattr(last_words, "time", module.time)
    monkeypatch.setattr(last_words, "Channel", lambda name: living[0]._channel)
    for one in living[1:]:
        one._channel.post(f"gone/{one._channel.index}", "")
    begun = now[0]
    living[0].say_goodbye()
    assert now[0] == begun
    del living[0]._channel.messages["gone/2"]
    living[0].say_goodbye()
    assert now[0] - begun >= FAILURE / 3  # it waits for process 2, which lives


def test_a_silence_is_told_once_before_it_counts_as_a_death(job, now, lines):
    living = job(2)[:1]
    assert silence(now, living, 0.5 * FAILURE) == [None]
    told = [line for line in lines() if "silent" in line]
    assert told == ["process 1 has been silent for 3 s; it was at step 0 (starting)"]
    (found,) = silence(now, living, 0.3 * FAILURE)
    assert isinstance(found, ms.PeerFailedError)
    assert not [line for line in lines() if "silent" in line]


def test_one_that_learns_of_a_death_from_another_does_not_wait_for_the_dead(job, now):
    living = job(3)[:2]
    living[1]._suspicious = True  # its collective has failed
    _, found = silence(now, living, 3.5)
    assert "Process 2 has been silent for 3 s" in str(found)
    assert living[0]._trouble is not None
    assert str(living[0]._trouble) == str(found)
    assert living[0]._dead == {2}


def test_the_first_failure_is_named_whoever_it_was(job, now):
    watching, *failing = job(4)
    for one in reversed(failing):
        one.report(ValueError("planned"))
        now[0] -= 5.0  # the clock of its machine is behind
    assert "Process 3 failed at step 0: ValueError: planned." in str(watch(watching))


def test_a_process_that_comes_late_does_not_stall_those_who_wait_for_it(job, now):
    present = job(3, present=2)
    for one in present:
        one.progress.waits = True
    assert silence(now, present, STALL + 20) == [None, None]
    present[0].progress.waits = False  # it does something of its own, and for too long
    found, _ = silence(now, present, STALL + 1)
    assert "No process has made any progress for 100 s (stall_timeout_secs). Process 0 is furthest behind" in str(found)
    assert str(found).endswith("Process 2 did not come so far.")


def test_a_signal_ends_a_process_that_comes_to_no_step(job, now, ends, caplog):
    one, other = job(2)
    one.end_soon(143)
    silence(now, [one, other], 39)
    with pytest.raises(Exit):
        silence(now, [one, other], 2)
    assert "came to no common step within 40 s of the signal" in caplog.text
    assert ends.armed[-1].code == 143


def test_a_signal_ends_no_process_where_all_have_reached_the_last_step(job, now):
    processes = job(2)
    for one in processes:
        one._stop = lambda: ms.StopReason.LAST_STEP
    processes[1].end_soon(143)
    assert silence(now, processes, 60) == [None, None]
    processes[0]._stop = lambda: None  # not all have
    with pytest.raises(Exit):
        silence(now, processes, 1)


def test_a_signal_ends_a_process_that_does_not_leave_the_loop(job, now, ends, caplog):
    processes = job(2)
    for one in processes:
        one._stop = lambda: ms.StopReason.PREEMPTED
        one.progress.step = 7
    processes[1].end_soon(143)
    with pytest.raises(Exit):
        silence(now, processes, 41)
    assert "were to stop at step 7 (the job was preempted), but did not all leave the loop within 40 s" in caplog.text


def test_a_signal_that_comes_while_all_meet_at_the_end_ends_nobody(job, now):
    one, other = job(2)
    one.end_soon(143)
    armed = one._give_up_at
    one.meet_at_end()
    one._give_up_at = armed  # as the watch sets it that was about to
    other.meet_at_end()
    assert silence(now, [one, other], 60) == [None, None]


def test_a_step_that_fails_on_all_alike_gives_way_to_another(job):
    one, other = job(2)
    for each in (one, other):
        each.dispatching(1, 111, False)
        each.all_met()
    one.take_back()
    one.dispatching(1, 222, False)  # the other one is still compiling the first
    assert beat(one, other) == [None, None]
    other.take_back()
    assert beat(one, other) == [None, None]
    one.take_back()
    one.progress.left = 0  # neither has run anything
    assert beat(one, other) == [None, None]


def test_a_step_that_fails_on_one_only_is_a_difference(job):
    one, other = job(2)
    for each in (one, other):
        each.dispatching(1, 111, False)
        each.all_met()
    one.take_back()
    one.dispatching(1, 222, False)
    one.progress.waits = True  # for the other one to begin it
    other.under_way()
    assert [type(found) for found in (*beat(one, other), *beat(one, other))] == [type(None)] * 4
    assert [type(found) for found in beat(one, other)] == [ms.ProcessesDivergedError] * 2


def test_what_is_certain_is_no_less_certain_for_being_old(job):
    one, other = job(2)
    one.dispatching(1, 111, True)
    other.dispatching(1, 222, True)
    assert [type(found) for found in beat(one, other)] == [ms.ProcessesDivergedError] * 2


def test_a_telling_from_before_a_program_was_taken_back_is_no_difference(job):
    """One has fallen back to a program that ran; the other did so too, and its thread that tells has been slow."""
    one, other = job(2)
    other.dispatching(1, 111, False)
    other.progress.waits = True
    beat(other)
    one.dispatching(1, 222, False)  # both met again, and this is on its way
    one.under_way()
    for _ in range(5):
        assert watch(one) is None
    other.take_back()
    other.dispatching(1, 222, False)
    other.progress.waits = False
    assert beat(other, one) == [None, None]


def test_one_that_still_compiles_what_another_has_given_up_is_waited_for(job):
    one, other = job(2)
    for each in (one, other):
        each.dispatching(1, 111, False)
    one.take_back()
    one.dispatching(1, 222, True)  # it ran before
    for _ in range(5):
        assert beat(one, other) == [None, None]


def test_blame_that_finds_nobody_suspects_nobody(job, now):
    one, other = job(2)
    error = ValueError("Gloo")
    begun = now[0]
    assert one.blame(error) is error
    assert now[0] - begun > 4
    begun = now[0]
    assert one.blame(error) is error  # on its way out it comes by here again
    assert now[0] == begun
    assert silence(now, [one], 4.0) == [None]
    other.report(ValueError("planned"))
    assert beat(one) != [None]
    assert isinstance(one.blame(error), ms.PeerFailedError)


def test_a_stall_that_one_has_found_is_known_to_all(job, now):
    """Its own end looks like progress to the others, who would wait for as long once more."""
    first, other = job(2)
    silence(now, [first, other], STALL - 1)
    first._moved -= 5
    (found,) = beat(first)
    first.progress.doing = "ending"
    assert str(watch(other)) == str(found)
    assert "No process has made any progress" in str(found)
    assert first._dead == other._dead == set()  # they are waited for at the end


def test_one_whose_training_thread_is_stuck_tells_what_all_fail_in(job, now):
    one, other = job(2)
    for process, program in ((one, 7), (other, 8)):
        process.dispatching(1, program, sure=True)
        process.under_way()
    other._programs.clear()  # it would not find it by itself
    one._tell()
    other._programs.append((1, 8, True))
    other._tell()
    found = watch(one)
    assert isinstance(found, ms.ProcessesDivergedError)
    other._programs.clear()
    heard = watch(other)
    assert isinstance(heard, ms.ProcessesDivergedError)
    assert str(heard) == str(found)


def test_one_of_this_machine_that_is_gone_need_not_be_silent_for_long(job, now):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        living = job(2)[0]
        name = dataclasses.replace(this_process(), pid=process.pid, start_time="")
        living._channel.post("process/1", json.dumps(dataclasses.asdict(name)))
        assert silence(now, [living], 2.0) == [None]  # it may be busy
        process.kill()
        process.wait()
        (found,) = silence(now, [living], 0.5)
    assert "Process 1 has been silent for 2 s; it was at step 0 (starting). It was killed" in str(found)
    assert living._dead == {1}
