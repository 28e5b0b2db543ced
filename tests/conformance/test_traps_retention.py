"""W-27: what is kept over time does not depend on how often the run was started again."""

from __future__ import annotations

import pytest
import ticks
from traps import count, session, steps_of, trap

import monsess as ms

BEGAN = 1e9


class Minutes(ms.SessionRunHook):
    """Every start takes 10 minutes and every step 25; each is committed before the next begins."""

    def __init__(self, clock: ms.testing.FakeClock) -> None:
        self._clock = clock

    def after_create_session(self, session, coord) -> None:
        self._session = session
        self._began_at = session.global_step
        self._clock.advance(10 * 60)

    def before_run(self, run_context) -> None:
        ticks.wait_for_saves(self._session, run_context.global_step - self._began_at)
        self._clock.advance(25 * 60)


def attempt(directory, clock: ms.testing.FakeClock, last_step: int) -> ms.MonitoredSession:
    """Train up to ``last_step``, saving every step."""
    hooks = [Minutes(clock), ms.StopAtStepHook(last_step=last_step)]
    keep = ms.KeepLast(1) | ms.KeepEvery(hours=1)
    with session(directory, *hooks, save_checkpoint_steps=1, keep=keep) as sess:
        while not sess.should_stop():
            sess.run(count)
    return sess


@trap("W-27")
@pytest.mark.parametrize("limits", [(10,), (2, 4, 6, 8, 10), tuple(range(1, 11))], ids=len)
def test_hours_are_counted_from_the_beginning_of_the_run_and_not_of_the_process(tmp_path, limits):
    saved: dict[int, float] = {}
    with ms.testing.FakeClock(start=BEGAN) as clock:
        for limit in limits:
            begun = clock.time() + 10 * 60
            sess = attempt(tmp_path, clock, limit)
            since = sess.restored_from or 0
            saved |= {step: begun + 25 * 60 * (step - since) - BEGAN for step in range(since + 1, limit + 1)}
            first = {int(at // 3600): step for step, at in reversed(saved.items())}
            first.pop(0, None)
            kept = {*first.values(), limit, *([since] if since else [])}
            assert steps_of(tmp_path) == sorted(kept)
    if limits == (10,):
        assert steps_of(tmp_path) == [2, 5, 7, 10]  # after 60, 135, 185 and 260 minutes


@trap("W-27")
def test_a_run_that_was_down_for_days_keeps_what_it_kept(tmp_path):
    with ms.testing.FakeClock(start=BEGAN) as clock:
        attempt(tmp_path, clock, 4)
        clock.advance(72 * 3600)
        attempt(tmp_path, clock, 8)
    assert steps_of(tmp_path) == [2, 4, 5, 7, 8]  # 2: one hour; 4: restored; 5 and 7: 74 and 75 hours; 8: the newest
