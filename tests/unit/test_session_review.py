"""Faults that a review found, each with the run that showed it."""

from __future__ import annotations

import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ticks
import toy

import monsess as ms


class History(ms.SessionRunHook):
    """Keeps a list that it goes on changing while a checkpoint is being written."""

    def begin(self):
        self.steps = []

    def after_run(self, run_context, run_values):
        self.steps.append(run_context.global_step)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_commit_holds_the_hook_state_of_its_step(tmp_path):
    written = threading.Event()

    class HoldTheWriter(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.global_step == 2:
                run_context.watch(None, lambda value: written.wait(20) and None)
            elif run_context.global_step == 5:  # a third save, of step 6, would hold the loop
                assert ms.latest_checkpoint(tmp_path) is None, "the writer is held"
                written.set()

    with ms.MonitoredTrainingSession(
        toy.init_fn,
        data=toy.batches(6),
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=2,
        max_in_flight=9,
        hooks=[History(), HoldTheWriter()],
    ) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    from monsess.checkpoint.restore import find_restorable

    for step in (2, 4, 6):
        restored = find_restorable(ms.CheckpointStore(tmp_path), restore_step=step)
        assert restored is not None
        assert restored.session["hooks"]["History"] == {"steps": list(range(1, step + 1))}


def test_second_life_does_not_change_what_a_third_one_gets():
    seen = []

    class FailsOnce(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.global_step == 3 and len(seen) < 2:
                seen.append(list(history.steps))
                raise ConnectionError("passes by itself")

    history = History()
    with ms.MonitoredTrainingSession(
        toy.init_fn,
        data=toy.batches(4),
        hooks=[history, FailsOnce()],
        recovery=ms.Recovery(
            backoff_secs=0, is_transient=lambda error: isinstance(error, ConnectionError), allow_reinit=True
        ),
    ) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    assert seen == [[1, 2, 3]] * 2
    assert history.steps == [1, 2, 3, 4]


def test_host_snapshot_of_a_typed_key_outlives_the_next_step(tmp_path):
    for last_step in (4, 8):
        with ms.MonitoredTrainingSession(
            toy.init_fn,
            data=toy.batches(8),
            checkpoint_dir=tmp_path,
            save_checkpoint_steps=1,
            checkpoint=ms.CheckpointOptions(snapshot="host"),
            hooks=[ms.StopAtStepHook(last_step=last_step)],
        ) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
    toy.assert_same_bits(sess.state_copy(), toy.straight(8))


class Pump(ms.SessionRunHook):
    """Feeds the queue that the data reads, from a thread that fails after some batches."""

    def __init__(self, batches, error=None):
        self.queue = queue.Queue()
        self.batches = batches
        self.error = error
        self.lives = 0

    def after_create_session(self, session, coord):
        self.lives += 1

        def work():
            with coord.stop_on_exception():
                for index in range(self.batches):
                    self.queue.put(toy.batch(index))
                if self.error is not None:
                    raise self.error
                coord.request_stop()

        coord.register_thread(thread := threading.Thread(target=work, daemon=True))
        thread.start()

    def __iter__(self):
        while True:
            yield self.queue.get()


def test_wait_for_the_input_ends_when_its_thread_has_failed():
    pump = Pump(2, OSError("the source is gone"))
    with pytest.raises(OSError, match="the source is gone"):
        with ms.MonitoredTrainingSession(toy.init_fn, data=pump, hooks=[pump]) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
    assert sess.stop_reason == ms.StopReason.ERROR


def test_wait_for_the_input_in_run_ends_when_its_thread_has_failed():
    pump = Pump(1, OSError("the source is gone"))
    with pytest.raises(OSError, match="the source is gone"):
        with ms.MonitoredTrainingSession(toy.init_fn, data=pump, hooks=[pump]) as sess:
            for _ in range(3):
                sess.run(toy.train)


def test_wait_for_the_input_ends_when_a_thread_asks_for_a_stop():
    pump = Pump(1)
    with ms.MonitoredTrainingSession(toy.init_fn, data=pump, hooks=[pump]) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
    assert sess.stop_reason == ms.StopReason.REQUESTED


def test_thread_that_fails_for_good_is_not_forgotten():
    pump = Pump(0, ConnectionError("again and again"))
    recovery = ms.Recovery(
        max_restarts=2, backoff_secs=0, is_transient=lambda e: isinstance(e, ConnectionError), allow_reinit=True
    )
    with pytest.raises(ConnectionError, match="again and again"):
        with ms.MonitoredTrainingSession(
            toy.init_fn, data=toy.batches(10_000), hooks=[pump], recovery=recovery
        ) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
    assert pump.lives == 3


@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
def test_functions_see_all_parts_of_a_stacked_output(engine):
    seen = {}

    class Look(ms.SessionRunHook):
        def before_run(self, run_context):
            return ms.SessionRunArgs({"name": "each", "function": lambda state, outputs: outputs["each"] * 1})

        def after_run(self, run_context, run_values):
            seen.update(jax.tree.map(np.asarray, run_values.results))

    @ms.train_step(engine=engine, reduce={"each": None})
    def step(state, batch):
        return state, {"each": batch["x"].sum(), "mean": batch["x"].mean()}

    with ms.MonitoredTrainingSession(lambda: jnp.zeros(()), hooks=[Look()]) as sess:
        sess.run(step, {"x": np.arange(8, dtype=np.float32)})
    assert seen["name"].tolist() == seen["function"].tolist() == [1, 5, 9, 13]


def test_save_asked_for_by_a_thread_is_made_by_the_next_run(tmp_path):
    with ms.MonitoredTrainingSession(toy.init_fn, data=toy.batches(30), checkpoint_dir=tmp_path) as sess:
        while not sess.should_stop():
            thread = threading.Thread(target=sess.request_save)
            thread.start()
            sess.run(toy.train)
            thread.join()
    store = ms.CheckpointStore(tmp_path)
    assert store.steps()[-1] == 30
    for step in store.steps():
        assert ms.load_checkpoint(tmp_path, step)["updates"] == step


def test_a_thread_of_an_earlier_life_does_not_go_on_in_the_next():
    calls = []
    lives = []

    class Loops(ms.SessionRunHook):
        def after_create_session(self, session, coord):
            life = len(lives) + 1
            lives.append(life)
            busy = threading.Event()

            def work():
                busy.set()
                if not session.recoveries:
                    threading.Event().wait(0.3)  # longer than the grace
                calls.append((life, session.recoveries))

            ms.LooperThread.loop(coord, 0.01, work)
            assert busy.wait(10)

        def after_run(self, run_context, run_values):
            if run_context.global_step == 2 and run_context.session.recoveries == 0:
                raise ConnectionError("once")

    with ms.MonitoredTrainingSession(
        toy.init_fn,
        data=toy.batches(5),
        hooks=[Loops()],
        stop_grace_period_secs=0.05,
        recovery=ms.Recovery(backoff_secs=0, is_transient=lambda e: isinstance(e, ConnectionError), allow_reinit=True),
    ) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
        threading.Event().wait(0.6)
    late = [life for life, recoveries in calls if life == 1 and recoveries == 1]
    assert len(late) <= 1  # the call that was under way, and none after it


def test_device_error_of_a_step_that_is_being_saved_is_recovered_from(tmp_path):
    failures = []

    def fail_once(n):
        if int(n) == 4 and len(failures) < len(jax.devices()):  # on every device: none waits for another
            failures.append(int(n))
            raise RuntimeError("UNAVAILABLE: the device is gone for a moment")
        return np.asarray(n)

    @ms.train_step
    def step(state, batch):
        n = jax.pure_callback(fail_once, jax.ShapeDtypeStruct((), jnp.int32), state["n"] + 1)
        return {"n": n, "sum": state["sum"] + jax.lax.pmean(batch["x"].mean(), "data")}, {}

    with ms.MonitoredTrainingSession(
        lambda: {"n": 0, "sum": 0.0},
        data=[{"x": np.full(8, i, np.float32)} for i in range(8)],
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=1,
        check_replicas=False,
        recovery=ms.Recovery(backoff_secs=0, is_transient=lambda e: "UNAVAILABLE" in str(e)),
    ) as sess:
        while not sess.should_stop():
            sess.run(step)
        assert float(sess.state["sum"]) == sum(range(8))
    assert sess.recoveries >= 1
    assert failures == [4] * len(jax.devices())


@pytest.mark.parametrize("remainder", ["error", "drop"])
def test_data_is_laid_out_for_the_devices_of_the_step(remainder):
    seen = []

    @ms.train_step(devices=jax.local_devices()[:2], reduce={"rows": "sum"})
    def step(state, batch):
        return state, {"rows": jnp.int32(batch["x"].shape[0])}

    data = [{"x": np.ones(6, np.float32)}] * 3
    with ms.MonitoredTrainingSession(lambda: 0, data=data, remainder=remainder) as sess:
        while not sess.should_stop():
            seen.append(int(sess.run(step)["rows"]))
    assert seen == [6, 6, 6]


def test_recovery_is_refused_where_it_would_lose_an_auxiliary_update(tmp_path):
    @ms.train_step(steps_per_run=0)
    def auxiliary(state):
        return {**state, "d": state["d"] + 1}, {}

    @ms.train_step
    def main(state):
        return {**state, "n": state["n"] + 1}, {}

    class Fails(ms.SessionRunHook):
        def before_run(self, run_context):
            if run_context.global_step == 2:
                raise ConnectionError("once")

    recovery = ms.Recovery(backoff_secs=0, is_transient=lambda e: isinstance(e, ConnectionError))
    with pytest.raises(ConnectionError) as caught:
        with ms.MonitoredTrainingSession(
            lambda: {"n": 0, "d": 0},
            checkpoint_dir=tmp_path,
            save_checkpoint_steps=1,
            hooks=[Fails()],
            recovery=recovery,
        ) as sess:
            while not sess.should_stop():
                sess.run(auxiliary)
                sess.run(main)
    assert any("auxiliary update" in note for note in caught.value.__notes__)


def test_batches_handed_over_are_not_taken_back_without_a_word(tmp_path, caplog):
    class Fails(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.global_step == 4 and run_context.session.recoveries == 0:
                raise ConnectionError("once")

    recovery = ms.Recovery(backoff_secs=0, is_transient=lambda e: isinstance(e, ConnectionError))
    with ms.MonitoredTrainingSession(
        toy.init_fn, checkpoint_dir=tmp_path, save_checkpoint_steps=2, hooks=[Fails()], recovery=recovery
    ) as sess:
        for index in range(5):
            sess.run(toy.train, toy.batch(index))
    assert "went back from step 4 to 2" in caplog.text
    assert "not taken back" in caplog.text


def test_function_made_anew_for_every_run_is_warned_of_once(caplog):
    class Lambda(ms.SessionRunHook):
        def before_run(self, run_context):
            return ms.SessionRunArgs(lambda state, outputs: outputs["loss"] + 1)

    with ms.MonitoredTrainingSession(toy.init_fn, data=toy.batches(70), hooks=[Lambda()]) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
        assert len(sess._fetcher._compiled) == 64
    assert caplog.text.count("Lambda fetches a new function with every run") == 1


def test_narrow_masked_mean_does_not_overflow():
    values = jnp.full((4, 2), 30_000, jnp.float16)
    mean = jax.vmap(ms.masked_mean, axis_name="data")(values, jnp.ones((4, 2), bool))
    assert mean.tolist() == [30_000.0] * 4


def test_hook_states_go_by_their_key(tmp_path):
    class Best(ms.SessionRunHook):
        def __init__(self, key):
            self.state_key = key
            self.value = None

        def after_run(self, run_context, run_values):
            self.value = f"{self.state_key}@{run_context.global_step}"

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    def attempt(*keys):
        hooks = [Best(key) for key in keys]
        with ms.MonitoredTrainingSession(
            toy.init_fn, data=toy.batches(3), checkpoint_dir=tmp_path, hooks=[*hooks, ms.StopAtStepHook(last_step=2)]
        ) as sess:
            while not sess.should_stop():
                sess.run(toy.train)
        return [hook.value for hook in hooks]

    assert attempt("train", "eval") == ["train@2", "eval@2"]
    assert attempt("extra", "eval", "train") == [None, "eval@2", "train@2"]


@pytest.mark.parametrize("state", [{"best": float("nan"), "k": (1, 2)}, {3: 1}, {"deep": [{"x": (1,)}]}])
def test_hook_state_that_json_changes_is_refused(state):
    class Odd(ms.SessionRunHook):
        def state_dict(self):
            return state

    with pytest.raises(ms.HookError, match="changes when it is stored"):
        ms.MonitoredTrainingSession(toy.init_fn, hooks=[Odd()])


def test_run_interrupted_half_way_is_never_committed(tmp_path, monkeypatch):
    from monsess.session import MonitoredSession

    sess = ms.MonitoredTrainingSession(
        toy.init_fn, data=toy.batches(9), checkpoint_dir=tmp_path, save_checkpoint_steps=2
    )
    advance = MonitoredSession._advance
    with pytest.raises(ms.MonsessError, match="interrupted it half-way"):
        with sess:
            for _ in range(3):
                sess.run(toy.train)

            def interrupted(self, *args, **kwargs):
                raise KeyboardInterrupt

            monkeypatch.setattr(MonitoredSession, "_advance", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sess.run(toy.train)  # the state has advanced, the step has not
            monkeypatch.setattr(MonitoredSession, "_advance", advance)
            with pytest.raises(ms.MonsessError, match="newest checkpoint is sound"):
                sess.run(toy.train)
            sess.run(toy.evaluate, toy.batch(0))
    assert ms.CheckpointStore(tmp_path).steps() == [2]


@pytest.mark.parametrize("place", ["before_run", "data", "step"])
def test_interruption_before_the_step_harms_nothing(tmp_path, place):
    interrupt = [place]

    def once(here):
        if here in interrupt:
            interrupt.clear()
            raise KeyboardInterrupt

    class Hook(ms.SessionRunHook):
        def before_run(self, run_context):
            if run_context.global_step == 2:
                once("before_run")

    class Data:
        def __iter__(self):
            yield from toy.batches(2)
            once("data")
            yield from toy.batches(9)[2:]

    @ms.train_step
    def step(state, batch):
        if sess.global_step == 0:
            once("step")
        return toy.train.function(state, batch)

    with ms.MonitoredTrainingSession(
        toy.init_fn, data=Data(), checkpoint_dir=tmp_path, hooks=[Hook()], prefetch=0
    ) as sess:
        interruptions = 0
        while not sess.should_stop():
            try:
                sess.run(step)
            except KeyboardInterrupt:
                interruptions += 1
                if place == "data":
                    break
    assert interruptions == 1
    last = sess.global_step
    assert last == (2 if place == "data" else 9)
    toy.assert_same_bits(sess.state_copy(), toy.straight(last))
    assert ms.latest_checkpoint(tmp_path) == last


def test_schedules_notice_multiples_crossed_in_runs_without_hooks(tmp_path):
    lines = []
    hook = ms.LoggingTensorHook(
        ["loss"], every_n_iter=10, formatter=lambda values: lines.append(sess.global_step) or ""
    )
    with ms.MonitoredTrainingSession(
        toy.init_fn,
        data=toy.batches(40),
        checkpoint_dir=tmp_path,
        save_checkpoint_steps=10,
        keep=ms.KeepLast(9),
        hooks=[hook],
    ) as sess:
        while not sess.should_stop():
            sess.run(toy.train)
            sess.run_without_hooks(toy.train)
    assert ms.CheckpointStore(tmp_path).steps() == [11, 21, 31, 40]
    assert lines == [1, 11, 21, 31]


def test_exit_with_code_0_commits_the_step_and_any_other_does_not(tmp_path):
    for code, expected in ((3, None), (0, 2)):
        with pytest.raises(SystemExit):
            with ms.MonitoredTrainingSession(toy.init_fn, data=toy.batches(5), checkpoint_dir=tmp_path) as sess:
                sess.run(toy.train)
                sess.run(toy.train)
                raise SystemExit(code)
        assert ms.latest_checkpoint(tmp_path) == expected


def test_session_that_was_never_closed_says_so_at_exit(tmp_path, caplog):
    from monsess.session import _at_exit

    sess = ms.MonitoredTrainingSession(
        toy.init_fn, data=toy.batches(5), checkpoint_dir=tmp_path, save_checkpoint_steps=2
    )
    for _ in range(3):
        sess.run(toy.train)
    _at_exit()
    assert "never closed: step 3 is not saved, the newest checkpoint is 2; use `with`" in caplog.text
    assert ms.latest_checkpoint(tmp_path) == 2
    sess.close()
    caplog.clear()
    _at_exit()
    assert "never closed" not in caplog.text


def test_close_in_finally_saves_nothing_after_an_error_and_says_so(tmp_path, caplog):
    sess = ms.MonitoredTrainingSession(toy.init_fn, checkpoint_dir=tmp_path)
    with pytest.raises(ms.BatchError):
        try:
            sess.run(toy.train, toy.batch(0))
            sess.run(toy.train, {"x": np.ones(3), "y": np.ones(3)})
        finally:
            sess.close()
    assert ms.latest_checkpoint(tmp_path) is None
    assert "step 1 is not saved" in caplog.text


def test_transient_error_of_a_call_inside_after_create_session_repeats_the_creation():
    trace = []

    class Outer(ms.SessionRunHook):
        def after_create_session(self, session, coord):
            trace.append("A")

    class Calls(ms.SessionRunHook):
        def after_create_session(self, session, coord):
            trace.append("B(")
            session.run_step_fn(self.step_fn)
            trace.append("B)")

        def step_fn(self, step_context):
            if trace.count("B(") == 1:
                raise ConnectionError("once")

    recovery = ms.Recovery(backoff_secs=0, is_transient=lambda e: isinstance(e, ConnectionError))
    with ms.MonitoredTrainingSession(toy.init_fn, hooks=[Outer(), Calls()], recovery=recovery) as sess:
        assert sess.recoveries == 0
    assert trace == ["A", "B(", "A", "B(", "B)"]


def test_sessions_that_save_at_the_same_time_do_not_disturb_each_other(tmp_path):
    """Orbax knows of one save at a time in a process; two at once made each other hang or fail, about one in ten."""
    urls = [tmp_path / name for name in ("a", "b", "c")]
    ended = []

    def train(url):
        with ms.MonitoredTrainingSession(
            ticks.init_fn, checkpoint_dir=url, save_checkpoint_steps=1, keep=ms.KeepLast(100)
        ) as sess:
            for _ in range(12):
                sess.run(ticks.one)
        ended.append(url)

    threads = [threading.Thread(target=train, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ended) == urls
    assert [ms.CheckpointStore(url).steps() for url in urls] == [list(range(1, 13))] * 3
    assert [ms.CheckpointStore(url).verify(12) for url in urls] == [[]] * 3
