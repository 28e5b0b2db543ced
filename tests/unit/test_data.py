"""Every batch is used exactly once, whatever the source, the prefetch and the moment of a restart."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import random
import threading
import time
import traceback
import weakref

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from names import shown

from monsess import data as data_module
from monsess.data import Input, repeat
from monsess.errors import BatchError, EndOfData, InputPositionError, SessionClosedError
from monsess.layout import Layout
from monsess.source import decode, encode

N = 4
COUNT = 7
PREFETCH = [0, 1, 2, 5]


@pytest.fixture
def layout() -> Layout:
    return Layout(jax.local_devices()[:N])


@pytest.fixture
def make(layout):
    """Inputs that are closed at the end, and a check that none of their threads is left."""
    made: list[Input] = []

    def make_input(data, **kwargs):
        made.append(Input(data, layout, **kwargs))
        return made[-1]

    yield make_input
    for one in made:
        one.close()
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == []


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "monsess-input"]


def batch(i: int) -> dict[str, np.ndarray]:
    return {"i": np.full(8, i), "x": np.full((8, 2), i, np.float32)}


class GetSet:
    """An iterator with Grain's methods."""

    def __init__(self, count: int = COUNT) -> None:
        self.at = 0
        self.count = count

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        return batch(self.at - 1)

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


class IterableOfGetSet:
    def __iter__(self):
        return GetSet()


class StatefulLoader:
    """An iterable that has the state itself, as torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        while self.at < COUNT:
            self.at += 1
            yield batch(self.at - 1)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Again:
    """A re-iterable that makes its batches anew, in one refilled buffer."""

    def __iter__(self):
        buffer = batch(0)
        for i in range(COUNT):
            buffer["i"][:] = i
            buffer["x"][:] = i
            yield buffer


def grain_dataset():
    return grain.MapDataset.range(COUNT * 8).map(lambda i: {"i": i // 8}).batch(8)


def grain_loader():
    class Numbers(grain.sources.RandomAccessDataSource):
        def __len__(self):
            return COUNT * 8

        def __getitem__(self, i):
            return {"i": np.int64(i // 8)}

        def __repr__(self):
            return "Numbers"

    return grain.DataLoader(
        data_source=Numbers(),
        sampler=grain.samplers.SequentialSampler(num_records=COUNT * 8),
        operations=[grain.transforms.Batch(8)],
    )


SOURCES = {
    "list": lambda: [batch(i) for i in range(COUNT)],
    "refilled buffer": Again,
    "generator": lambda: iter(Again()),
    "device-resident": lambda: [jax.tree.map(jnp.asarray, batch(i)) for i in range(COUNT)],
    "get_state": GetSet,
    "iterable of get_state": IterableOfGetSet,
    "state_dict on the iterable": StatefulLoader,
    "grain dataset": grain_dataset,
    "grain iterator": lambda: iter(grain_dataset()),
    "grain iter dataset": lambda: grain_dataset().to_iter_dataset(),
    "grain DataLoader": grain_loader,
    "repeat": lambda: repeat([batch(i) for i in range(COUNT)], 1),
    "repeat of grain": lambda: repeat(grain_dataset(), 1),
}
KINDS = {
    "list": "re-iterable",
    "refilled buffer": "re-iterable",
    "device-resident": "re-iterable",
    "repeat": "re-iterable",
    "generator": "iterator",
}


def number(item) -> int:
    values = np.asarray(item.batch["i"])
    assert values.shape == (N, 2)
    assert values.min() == values.max()
    return int(values[0, 0])


def use(one: Input, count: int | None = None) -> list[int]:
    """Consume ``count`` batches, or all there are."""
    used: list[int] = []
    while len(used) != count and not one.ended():
        item = one.peek()
        used.append(number(item))
        assert item is one.peek()
        one.consume()
    return used


def stored(position):
    return json.loads(json.dumps(position))


@pytest.mark.parametrize("prefetch", PREFETCH)
@pytest.mark.parametrize("name", SOURCES)
def test_all_batches_once_and_in_order(make, name, prefetch):
    one = make(SOURCES[name](), prefetch=prefetch)
    assert use(one) == list(range(COUNT))
    assert one.position()["consumed"] == COUNT
    assert one.position()["kind"] == KINDS.get(name, "stateful")
    assert one.position()["global_batch"] == 8
    for _ in range(3):
        with pytest.raises(EndOfData, match="after 7 batches"):
            one.peek()
        assert one.ended()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", SOURCES)
def test_exactly_once_across_restarts(make, name, prefetch):
    used: list[int] = []
    position = None
    for count in (0, 1, 3, 0, 2, 1, None):
        one = make(SOURCES[name](), prefetch=prefetch)
        if position is not None:
            one.restore(position)
        used += use(one, count)
        if count != 0:
            one.ended()  # a batch that is known, but not consumed
        position = stored(one.position())
        assert position["consumed"] == len(used)
        one.close()
    assert used == list(range(COUNT))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", [name for name in SOURCES if name != "generator"])
def test_recovery_rewinds_while_the_thread_runs(make, name, prefetch):
    one = make(SOURCES[name](), prefetch=prefetch)
    assert one.can_rewind
    start = stored(one.position())
    assert use(one, 2) == [0, 1]
    second = stored(one.position())
    assert use(one, 3) == [2, 3, 4]
    one.restore(second)
    assert one.position() == second
    assert use(one, 1) == [2]
    one.restore(second)
    assert use(one) == [2, 3, 4, 5, 6]
    one.restore(start)
    assert use(one) == list(range(COUNT))


def test_recovery_from_an_error_of_the_source(make):
    class Fails:
        tries = 0

        def __iter__(self):
            Fails.tries += 1
            for i in range(COUNT):
                if i == 3 and Fails.tries == 1:
                    raise OSError("gone for a moment")
                yield batch(i)

    one = make(Fails())
    assert use(one, 2) == [0, 1]
    position = stored(one.position())
    assert use(one, 1) == [2]
    with pytest.raises(OSError, match="gone"):
        one.peek()
    one.restore(position)
    assert use(one) == [2, 3, 4, 5, 6]


def test_bare_iterators_say_at_start_that_they_cannot_rewind(make, caplog):
    with caplog.at_level(logging.INFO, "monsess"):
        one = make(iter(Again()))
    assert "cannot rewind" in caplog.text
    assert not one.can_rewind
    use(one, 1)
    first = stored(one.position())
    use(one, 2)
    with pytest.raises(InputPositionError, match=r"bare iterator.* 3 batches .* batch 1\b"):
        one.restore(first)
    here = stored(one.position())
    one.peek()
    one.restore(here)  # the position that it is at
    assert use(one) == [3, 4, 5, 6]


def test_the_thread_begins_with_the_first_peek_and_stays_within_its_bound(make):
    pulled = []

    def source():
        for i in range(COUNT):
            pulled.append(i)
            yield batch(i)

    one = make(source(), prefetch=2)
    one.position()
    time.sleep(0.05)
    assert pulled == []
    assert threads() == []
    one.peek()
    time.sleep(0.1)
    assert pulled == [0, 1]
    one.consume()
    time.sleep(0.1)
    assert pulled == [0, 1, 2]
    assert one.position()["consumed"] == 1


def test_no_thread_without_prefetch(make):
    one = make(Again(), prefetch=0)
    use(one, 2)
    assert threads() == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_source_that_changed_its_order_is_found(make, prefetch):
    batches = [batch(i) for i in range(COUNT)]
    one = make(batches, prefetch=prefetch)
    use(one, 4)
    position = stored(one.position())
    shuffled = batches[:3] + batches[4:]
    two = make(shuffled, prefetch=prefetch)
    with pytest.raises(InputPositionError, match=r"Batch 3 .* changed its order or its data"):
        two.restore(position)
    with pytest.raises(InputPositionError, match="failed"):  # and it does not go on somewhere else
        two.peek()
    same_start = [*batches[:4], batches[6], batches[5]]
    three = make(same_start, prefetch=prefetch)
    three.restore(position)
    assert use(three) == [6, 5]


@pytest.mark.parametrize(
    "change",
    [
        lambda b: {**b, "x": b["x"].astype(np.float16)},
        lambda b: {"i": b["i"], "z": b["x"]},
        lambda b: {**b, "x": b["x"].reshape(8, 2, 1)},
        lambda b: {**b, "x": b["x"] * -1},
    ],
    ids=["dtype", "path", "shape", "bytes"],
)
def test_the_checksum_sees(make, change):
    one = make([batch(1), batch(2)])
    use(one, 1)
    with pytest.raises(InputPositionError, match="Batch 0"):
        make([change(batch(1)), batch(2)]).restore(one.position())


def test_the_checksum_takes_device_arrays_and_keys_as_equal_to_themselves(make):
    keys = jax.random.split(jax.random.key(0), 8)
    batches = [{"i": jnp.full(8, i), "k": keys, "b": jnp.ones(8, jnp.bfloat16)} for i in range(3)]
    one = make(batches)
    assert use(one, 2) == [0, 1]
    two = make(batches)
    two.restore(stored(one.position()))
    assert use(two) == [2]
    batches[1]["k"] = jax.random.split(jax.random.key(1), 8)
    with pytest.raises(InputPositionError, match="Batch 1"):
        make(batches).restore(stored(one.position()))


def test_a_source_that_ends_early_is_found(make):
    one = make(Again())
    use(one, 5)
    with pytest.raises(InputPositionError, match=r"ended after 4 batches.*after 5"):
        make([batch(i) for i in range(4)]).restore(one.position())


def test_a_finished_input_is_finished_after_a_restart(make):
    for name in SOURCES:
        one = make(SOURCES[name]())
        use(one)
        two = make(SOURCES[name]())
        two.restore(stored(one.position()))
        assert two.ended(), name


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_an_error_of_the_source_comes_in_order_with_type_traceback_and_note(make, prefetch):
    def broken_source():
        yield from (batch(i) for i in range(3))
        raise KeyError("missing file")

    one = make(broken_source(), prefetch=prefetch)
    assert use(one, 3) == [0, 1, 2]
    assert not one.ended()
    lengths = []
    for _ in range(3):
        with pytest.raises(KeyError, match="missing file") as caught:
            one.peek()
        lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
        assert "broken_source" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert caught.value.__notes__ == ["raised by the training input, batch 3"]
    assert len(set(lengths)) == 1
    assert one.position()["consumed"] == 3


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_that_does_not_fit_comes_in_order(make, prefetch):
    one = make([batch(0), {"i": np.zeros(6)}], prefetch=prefetch)
    assert use(one, 1) == [0]
    with pytest.raises(BatchError, match="4 local devices") as caught:
        one.peek()
    assert caught.value.__notes__ == ["found in batch 1 of the training input"]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_only_the_source_itself_can_end_the_input(make, prefetch):
    def leaking():
        yield batch(0)
        next(iter(()))

    one = make(leaking(), prefetch=prefetch)
    use(one, 1)
    with pytest.raises(RuntimeError, match="StopIteration"):
        one.peek()

    def says_so():
        yield batch(0)
        raise EndOfData

    two = make(says_so(), prefetch=prefetch)
    assert use(two) == [0]
    with pytest.raises(EndOfData):
        two.peek()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_while_skipping_keeps_its_type(make, prefetch):
    def broken_source():
        yield batch(0)
        raise PermissionError("no")

    one = make(Again())
    use(one, 3)
    two = make(broken_source(), prefetch=prefetch)
    with pytest.raises(PermissionError) as caught:
        two.restore(one.position())
    assert "batch 1, on the way to the stored position" in caught.value.__notes__[0]
    with pytest.raises(InputPositionError, match="failed"):
        two.peek()


class Blocked:
    """Gives one batch and then blocks until it is let go."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.inside = threading.Event()
        self.closed_in: str | None = None
        self.given = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.given += 1
        if self.given > 1:
            self.inside.set()
            self.free.wait(30)
            self.inside.clear()
        return batch(self.given - 1)

    def close(self):
        assert not self.inside.is_set()
        self.closed_in = threading.current_thread().name


def test_close_does_not_wait_for_a_blocked_source(make):
    source = Blocked()
    one = make(source)
    use(one, 1)
    assert source.inside.wait(5)
    began = time.monotonic()
    one.close()
    one.close()
    assert time.monotonic() - began < 2
    assert source.closed_in is None  # the thread is inside
    with pytest.raises(SessionClosedError):
        one.peek()
    with pytest.raises(SessionClosedError):
        one.restore(one.position())
    source.free.set()
    deadline = time.monotonic() + 5
    while source.closed_in is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert source.closed_in == "monsess-input"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_close_closes_the_generator_and_keeps_the_position(make, prefetch):
    ended = []

    class Source:
        def __iter__(self):
            try:
                yield from Again()
            finally:
                ended.append(threading.current_thread().name)

    one = make(Source(), prefetch=prefetch)
    use(one, 2)
    one.close()
    assert ended == [threading.current_thread().name]
    assert one.position()["consumed"] == 2


def test_an_error_while_closing_is_logged(make, caplog):
    def source():
        try:
            yield from Again()
        finally:
            raise ValueError("cannot close")

    one = make(source())
    one.peek()
    one.close()
    assert "while it was closed" in caplog.text
    assert "cannot close" in caplog.text


def test_close_wakes_a_waiting_peek(make):
    source = Blocked()
    one = make(source)
    use(one, 1)
    threading.Timer(0.2, one.close).start()
    with pytest.raises(SessionClosedError):
        one.peek()
    source.free.set()


def test_a_check_interrupts_the_wait_and_nothing_is_lost(make):
    source = Blocked()
    one = make(source)
    use(one, 1)
    calls = itertools.count()

    def check():
        if next(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        one.peek(check)
    assert 0.1 < one.seconds_waited < 5
    source.free.set()
    assert number(one.peek(check)) == 1


def test_restore_gives_up_on_a_blocked_source(make, monkeypatch):
    monkeypatch.setattr(data_module, "RESTORE_WAIT_SECS", 0.2)

    class BlockedWithState(Blocked):
        def get_state(self):
            return self.given

        def set_state(self, state):
            raise AssertionError("the thread is inside")

    source = BlockedWithState()
    one = make(source)
    position = one.position()
    use(one, 1)
    assert source.inside.wait(5)
    with pytest.raises(InputPositionError, match="busy"):
        one.restore(position)
    with pytest.raises(InputPositionError):
        one.peek()
    source.free.set()


def test_seconds_waited_is_what_peek_blocked(make):
    def slow():
        for i in range(3):
            time.sleep(0.1)
            yield batch(i)

    for prefetch in (0, 2):
        one = make(slow(), prefetch=prefetch)
        assert one.seconds_waited == 0
        one.peek()
        waited = one.seconds_waited
        assert 0.09 < waited < 2
        time.sleep(0.3)
        one.peek()
        one.consume()
        if prefetch:
            one.peek()
            assert one.seconds_waited == waited  # it was there


def test_remainders(make):
    batches = [{"i": np.full(rows, rows)} for rows in (8, 6, 3)]
    padded = make(batches, remainder="pad")
    sums = []
    while not padded.ended():
        item = padded.peek()
        assert item.mask.shape == item.batch["i"].shape
        assert item.mask.dtype == bool
        sums.append(int(np.asarray(item.mask).sum()))
        padded.consume()
    assert sums == [8, 6, 3]

    dropped = make(batches, remainder="drop")
    rows = []
    while not dropped.ended():
        rows.append(dropped.peek().batch["i"].size)
        assert dropped.peek().mask is None
        dropped.consume()
    assert rows == [8, 4]  # three rows do not reach four devices
    assert dropped.position()["consumed"] == 2


def test_a_batch_that_is_dropped_whole_counts_with_the_next_one(make):
    batches = [batch(0), {k: v[:3] for k, v in batch(1).items()}, batch(2), batch(3)]
    one = make(batches, remainder="drop")
    assert use(one, 2) == [0, 2]
    two = make(batches, remainder="drop")
    two.restore(stored(one.position()))
    assert use(two) == [3]


@pytest.mark.parametrize("name", [name for name in SOURCES if KINDS.get(name) is None])
def test_states_belong_to_their_number_of_processes(make, name):
    positions = []
    for index in range(2):
        one = make(SOURCES[name](), process_index=index, process_count=2)
        use(one, 3)
        positions.append(stored(one.position()))
    assert positions[0]["global_batch"] == 16
    with pytest.raises(InputPositionError, match=r"states of 2 process.* 1 are running"):
        make(SOURCES[name]()).restore(positions)
    two = make(SOURCES[name](), process_index=1, process_count=2)
    two.restore(positions)
    assert use(two, 1) == [3]


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("now", [1, 2, 4])
def test_another_number_of_processes_skips_the_common_number(make, before, now):
    rows = np.arange(16 * COUNT).reshape(COUNT, 16)

    def shard(index, count):
        size = 16 // count
        return [{"x": whole[index * size : (index + 1) * size]} for whole in rows]

    positions = []
    for index in range(before):
        one = make(shard(index, before), process_index=index, process_count=before)
        for _ in range(3):
            one.peek()
            one.consume()
        positions.append(stored(one.position()))
    seen = []
    for index in range(now):
        one = make(shard(index, now), process_index=index, process_count=now)
        one.restore(positions)
        seen += np.asarray(one.peek().batch["x"]).ravel().tolist()
    assert sorted(seen) == rows[3].tolist()


def test_another_global_batch_is_refused_with_both(make):
    one = make(Again())
    use(one, 2)
    two = make(Again(), process_count=2)
    with pytest.raises(InputPositionError, match=r"global batch of 8 rows; 2 now read 16 \(8 each\)"):
        two.restore(one.position())


def test_positions_that_do_not_belong_together_are_refused(make):
    positions = []
    for index, count in enumerate((2, 3)):
        one = make(Again(), process_index=index, process_count=2)
        use(one, count)
        positions.append(one.position())
    with pytest.raises(InputPositionError, match=r"\[2, 3\]"):
        make(Again()).restore(positions)
    with pytest.raises(InputPositionError, match="no input position of process 1 of 2"):
        make(Again(), process_index=1, process_count=2).restore(positions[0])
    with pytest.raises(InputPositionError, match="Expected a stored input position"):
        make(Again()).restore({"consumed": 3})
    with pytest.raises(InputPositionError, match="Expected a stored input position"):
        make(Again()).restore([])


def test_redistribute(make):
    class Shards(GetSet):
        def redistribute(self, states, process_index, process_count):
            assert [state["at"] for state in states] == [3, 3]
            return {"at": 2 * 3 // process_count + process_index}

    positions = []
    for index in range(2):
        one = make(Shards(), process_index=index, process_count=2)
        use(one, 3)
        positions.append(stored(one.position()))
    two = make(Shards())
    two.restore(positions[::-1])
    assert use(two) == [6]
    with pytest.raises(InputPositionError, match=r"all 2 processes, found 1"):
        make(Shards()).restore(positions[:1])


def test_another_kind_of_source(make):
    with_state = make(GetSet())
    use(with_state, 3)
    with pytest.raises(InputPositionError, match="list has none to set"):
        make([batch(i) for i in range(COUNT)]).restore(with_state.position())
    plain = make([batch(i) for i in range(COUNT)])
    use(plain, 3)
    after = make(GetSet())
    after.restore(plain.position())  # skipped, and checked by the checksum
    assert use(after, 2) == [3, 4]
    assert after.position()["state"] == {"at": 5}


def test_a_refused_state_says_so(make):
    class Picky(GetSet):
        def set_state(self, state):
            raise ValueError("other data source")

    one = make(Picky())
    use(one, 1)
    with pytest.raises(InputPositionError, match=r"refused .*ValueError: other data source"):
        make(Picky()).restore(one.position())


def test_states_that_cannot_be_stored_are_found_at_once(make):
    class Odd(GetSet):
        def get_state(self):
            return {"at": self.at, "rng": [random.Random(0)]}

    with pytest.raises(InputPositionError, match=r"state\['rng'\]\[0\] is a random.Random"):
        make(Odd())

    class Later:
        def __iter__(self):
            return Odd()

    with pytest.raises(InputPositionError, match=r"random.Random"):
        make(Later()).peek()


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        0.1,
        "ü",
        b"\x00\xff",
        bytearray(b"ab"),
        [1, [2.5, None]],
        (1, (2, "a")),
        {"a": {"b": b"x"}, "c": ()},
        {1: "int", ("t", 2): [3]},
        {"__monsess__": "bytes", "data": "not ours"},
        random.Random(3).getstate(),
        np.random.default_rng(3).bit_generator.state,
        np.random.RandomState(3).get_state(),
        np.arange(6, dtype=np.uint64).reshape(2, 3),
        np.array([1.5, -0.0], jnp.bfloat16),
        np.zeros((0, 3)),
        np.array("2026-01-01", "M8[D]"),
        np.float32(1.5),
        np.int64(2**40),
        jnp.arange(3),
    ],
    ids=shown,
)
def test_states_survive_json_exactly(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert type(back) is type(value)
    if hasattr(value, "dtype"):
        assert back.dtype == value.dtype
        assert back.shape == value.shape
        assert np.asarray(back).tobytes() == np.asarray(value).tobytes()
    else:
        assert repr(back) == repr(value)


def test_keys_survive_json():
    key = jax.random.key(7, impl="rbg")
    back = decode(json.loads(json.dumps(encode({"key": key}))))["key"]
    assert back.dtype == key.dtype
    assert jax.random.bits(back) == jax.random.bits(key)


def test_states_are_copied_when_they_are_read(make):
    class Mutable(GetSet):
        state: dict = {}  # noqa: RUF012

        def get_state(self):
            self.state["at"] = self.at
            return self.state

    one = make(Mutable(), prefetch=5)
    use(one, 2)
    time.sleep(0.05)
    assert one.position()["state"] == {"at": 2}


def test_stored_states_of_a_newer_version_are_refused():
    with pytest.raises(InputPositionError, match="newer"):
        decode({"__monsess__": "set", "items": []})


def test_long_skips_are_reported(make, caplog, monkeypatch):
    now = itertools.count(0, 4)
    one = make(Again())
    use(one, 6)
    monkeypatch.setattr(data_module.clock, "monotonic", lambda: next(now))
    with caplog.at_level(logging.INFO, "monsess"):
        make(Again()).restore(one.position())
    assert [r.message for r in caplog.records if "skipped" in r.message][:2] == [
        "The training input: skipped 3 of 6 consumed batches.",
        "The training input: skipped 6 of 6 consumed batches.",
    ]


def test_an_iterable_that_hands_out_one_iterator_cannot_rewind_unnoticed(make):
    class Once:
        def __init__(self):
            self.iterator = iter(Again())

        def __iter__(self):
            return self.iterator

    one = make(Once())
    use(one, 1)
    position = one.position()
    with pytest.raises(InputPositionError, match="returned before"):
        one.restore(position)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": np.zeros(8)}, r"found one dict.*\[batch\]"),
        (3, "found int"),
        ("batches", "found one str"),
        (Again, "Call it: Again"),
        (lambda: None, "found function"),
        (None, "found NoneType"),
    ],
)
def test_what_is_no_source_is_refused(make, data, message):
    with pytest.raises(BatchError, match=message):
        make(data)


@pytest.mark.parametrize("kwargs", [{"prefetch": -1}, {"prefetch": True}, {"prefetch": 1.5}, {"remainder": "skip"}])
def test_bad_arguments(make, kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        make([], **kwargs)


def test_an_empty_source_has_ended(make):
    one = make([])
    assert one.ended()
    assert one.position()["global_batch"] is None


def test_consume_needs_a_batch(make):
    one = make([])
    with pytest.raises(AssertionError, match="peek"):
        one.consume()
    one.ended()
    with pytest.raises(AssertionError, match="peek"):
        one.consume()


def test_a_forgotten_input_leaves_no_thread(layout):
    one = Input(Again(), layout)
    one.peek()
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == []


def test_prefetching_makes_no_implicit_transfer(make):
    batches = [batch(0), jax.tree.map(jnp.asarray, batch(1)), batch(2)]
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        one = make(batches, remainder="pad")
        items = []
        while not one.ended():
            items.append(one.peek())
            one.consume()
        one.position()
    finally:
        jax.config.update("jax_transfer_guard", "allow")
    assert [number(item) for item in items] == [0, 1, 2]


def test_random_restarts_and_recoveries_use_every_batch_once(make):
    rng = random.Random(0)
    for name in ("refilled buffer", "get_state", "state_dict on the iterable", "grain dataset", "repeat of grain"):
        committed: list[int] = []
        one = make(SOURCES[name](), prefetch=rng.choice(PREFETCH))
        position = stored(one.position())
        while True:
            attempt = use(one, rng.randint(0, 3))
            fate = rng.choice(["commit", "recover", "restart"])
            if fate == "commit" or not attempt:
                committed += attempt
                position = stored(one.position())
                if one.ended():
                    break
            elif fate == "recover":
                one.restore(position)
            else:
                one.close()
                one = make(SOURCES[name](), prefetch=rng.choice(PREFETCH))
                one.restore(position)
        assert committed == list(range(COUNT)), name


class TestRepeat:
    def test_epochs(self, make):
        assert list(repeat([1, 2], 3)) == [1, 2] * 3
        assert list(itertools.islice(repeat([1, 2]), 5)) == [1, 2, 1, 2, 1]
        twice = repeat([1, 2], 1)
        assert list(twice) == list(twice) == [1, 2]

    def test_stays_at_its_end(self):
        iterator = iter(repeat([1], 1))
        assert list(iterator) == [1]
        assert list(iterator) == []

    def test_an_empty_source_raises_at_once(self, make):
        for epochs in (None, 2):
            with pytest.raises(BatchError, match="Epoch 0 of the repeated list is empty"):
                next(iter(repeat([], epochs)))
        with pytest.raises(BatchError, match="Epoch 0"):
            make(repeat([])).peek()

    def test_a_source_that_runs_dry_raises(self):
        class Once:
            left = 1

            def __iter__(self):
                self.left, left = 0, self.left
                return iter([1] * left)

        with pytest.raises(BatchError, match="Epoch 1"):
            list(repeat(Once()))

    @pytest.mark.parametrize("iterator", [lambda: iter([1]), lambda: (i for i in [1]), GetSet])
    def test_iterators_are_refused(self, iterator):
        with pytest.raises(InputPositionError, match="cannot be iterated twice"):
            repeat(iterator())

    @pytest.mark.parametrize("epochs", [0, -1, 1.5, True])
    def test_bad_epochs(self, epochs):
        with pytest.raises(ValueError, match="epochs"):
            repeat([1], epochs)

    def test_what_is_no_source(self):
        with pytest.raises(BatchError):
            repeat({"x": 1})

    @pytest.mark.parametrize("consumed", [0, 3, COUNT - 1, COUNT, COUNT + 1, 2 * COUNT, 3 * COUNT])
    @pytest.mark.parametrize("source", [Again, IterableOfGetSet, grain_dataset])
    def test_resumes_in_every_epoch(self, make, source, consumed):
        one = make(repeat(source(), 3))
        assert one.can_rewind
        used = use(one, consumed)
        two = make(repeat(source(), 3))
        two.restore(stored(one.position()))
        assert (two.position()["state"] is None) == (source is Again)
        assert used + use(two) == list(range(COUNT)) * 3

    def test_closing_closes_the_pass_under_way(self):
        closed = []

        class Source:
            def __iter__(self):
                try:
                    yield from [1, 2]
                finally:
                    closed.append(True)

        iterator = iter(repeat(Source()))
        next(iterator)
        iterator.close()
        assert closed == [True]
        with pytest.raises(StopIteration):
            next(iterator)


def test_ahead_waits_until_it_is_told_that_what_is_there_has_to_do(make):
    more = threading.Event()

    def source():
        yield batch(0)
        yield batch(1)
        more.wait(60)
        yield from map(batch, range(2, 5))

    asked = []
    read = make(source(), prefetch=4)
    assert read.ahead(3, lambda: bool(asked.append(None)) or len(asked) > 1) == 2
    assert len(asked) == 2
    read.peek()
    assert read.ahead(3, lambda: True) == 1
    more.set()
    assert read.ahead(3, lambda: False) == 3
    for follow in (3, 2, 1, 0):  # of five in all
        read.peek()
        read.consume()
        read.peek()
        assert read.ahead(3) == follow
