"""Credentials are handed to fsspec and to nobody else, whatever goes well or wrong, in sessions and in every command.

The store of these tests repeats all it knows in every error, with a cause that does so too. The user's name is no
secret by itself: hiding "root" or "data" wherever they come up would hide what went wrong.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
import pytest
import smoke_run
import ticks
from leaky import LeakyFileSystem

import monsess as ms
from monsess.commands import COMMANDS, main

USER, PASSWORD = "anna-the-l0gin", "pa55%2Fw0rd-of-anna"
SLASHED = "pa55ed/w1th@a/sl4shes"  # as nobody should write it in a URL, and somebody will
PRIVATE_KEY = "-----BEGIN K3Y-----\nMIIEvQ/f1rst+line\nsec0nd+l1ne==\n-----END K3Y-----\n"
QUOTED = "it's\\b4ck\"quoted"
OPTIONS: dict[str, Any] = {
    "key": "AKIALEAKYKEY0123",
    "secret": "s3cr3t/of+the=leaky?store",
    "client_kwargs": {"aws_session_token": "t0ken-of-the-leaky-store"},
    "headers": {"Authorization": ["Bearer be4rer-t0ken"]},
    "connection_string": "Account=a;Seal=c0nnection-s3al",
    "token": {"type": "service_account", "private_key": PRIVATE_KEY},
    "passphrase": QUOTED,
}
_PLAIN = (
    PASSWORD,
    unquote(PASSWORD),
    "AKIALEAKYKEY0123",
    "s3cr3t/of+the=leaky?store",
    "t0ken-of-the-leaky-store",
    "be4rer-t0ken",
    "c0nnection-s3al",
    PRIVATE_KEY,
    *PRIVATE_KEY.split(),
    "sec0nd+l1ne",
    QUOTED,
    "b4ck",  # however the rest is escaped
    SLASHED,
    *SLASHED.split("/"),
    "w1th",
)
_WRITTEN = (
    str,
    quote,
    lambda plain: quote(plain, ""),
    lambda plain: repr(plain)[1:-1],
    lambda plain: json.dumps(plain)[1:-1],
)
SECRETS = {write(plain).encode() for plain in _PLAIN for write in _WRITTEN}
ERRORS = {"refused": PermissionError, "lost": ConnectionError, "broken": RuntimeError}


def assert_clean(what: str, text: str | bytes) -> None:
    """No secret is in a text."""
    data = text if isinstance(text, bytes) else text.encode(errors="surrogateescape")
    shown = [secret for secret in SECRETS if secret in data]
    assert not shown, f"{what} shows {shown}:\n{data.decode(errors='replace')[:5000]}"


def command_lines() -> str:
    """The arguments of this process and of everything that it started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (ValueError, OSError):
            continue
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    lines = []
    for pid in family:
        try:
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)


@pytest.fixture
def url() -> str:
    return f"leaky://{USER}:{PASSWORD}@{uuid.uuid4().hex}/run"


@pytest.fixture
def store_fails(monkeypatch) -> Callable[..., None]:
    """Call it with the kinds of operations that fail from now on."""

    def fail(*kinds: str, error: type[Exception] = PermissionError) -> None:
        monkeypatch.setattr(LeakyFileSystem, "fails", dict.fromkeys(kinds, error))

    fail()
    return fail


@pytest.fixture(autouse=True)
def everything_said_is_clean(caplog, capfd) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    for record in caplog.records:
        assert_clean("the log", record.getMessage() + str(record.args) + str(record.exc_text))
        if record.exc_info:
            assert_clean("the log", "".join(traceback.format_exception(*record.exc_info)))
    out, err = capfd.readouterr()
    assert_clean("stdout", out)
    assert_clean("stderr", err)


def objects(url: str) -> dict[str, bytes]:
    store = LeakyFileSystem(skip_instance_cache=True)
    names = store.find(url)
    return {name: store.cat_file(name) for name in names}


def complaint(call: Callable[[], Any], kind: type[BaseException] = ms.MonsessError) -> str:
    """Everything that is shown of the error of ``call``, of all that led to it, and of what it is made of."""
    with pytest.raises(kind) as raised:
        call()
    text = "".join(traceback.format_exception(raised.value))
    one: BaseException | None = raised.value
    while one is not None:
        text += repr(one) + str(getattr(one, "__notes__", ""))
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    assert_clean("an exception", text)
    return text


class Watching(ms.SessionRunHook):
    """Looks at the arguments of all processes while the session saves."""

    def after_run(self, run_context, run_values):
        if run_context.global_step < 9:
            assert_clean("a process", command_lines())


#: Where a save is to fail, though what fails could pass.
HASTY = ms.CheckpointOptions(save_timeout_secs=1)


def attempt(url: str, last_step: int = 6, **more: Any) -> ms.MonitoredSession:
    options = {
        "save_checkpoint_steps": 2,
        "keep": ms.KeepLast(1),
        **more,
    }
    with ms.MonitoredTrainingSession(
        ticks.init_fn,
        checkpoint_dir=url,
        storage_options=OPTIONS,
        hooks=[Watching(), ms.StopAtStepHook(last_step=last_step)],
        **options,
    ) as session:
        assert_clean("the session", f"{session!r} {session} {session.summary()}")
        while not session.should_stop():
            session.run(ticks.one)
    assert_clean("the summary", repr(session.summary()))
    return session


def test_a_run_that_goes_well(url, store_fails):
    attempt(url)
    attempt(url, 8)
    store = ms.CheckpointStore(url, OPTIONS)
    store.pin(8)
    assert_clean("the store", f"{store!r} {store} {store.url}")
    assert store.verify(8) == []
    found = objects(url)
    assert {"run.json", "session.json", "commit.json", "8"} <= {name.rpartition("/")[2] for name in found}
    for name, data in found.items():
        assert_clean(name, data)


@pytest.mark.parametrize(
    ("kind", "error"), [("list", "refused"), ("read", "refused"), ("write", "refused"), ("list", "broken")]
)
def test_a_start_that_fails(url, store_fails, kind, error):
    attempt(url, 2)
    store_fails(kind, error=ERRORS[error])
    assert "leaky://***@" in complaint(lambda: attempt(url))


@pytest.mark.parametrize("error", ERRORS)
def test_a_save_that_fails(url, store_fails, error):
    class Breaks(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.global_step == 3:
                store_fails("write", "delete", error=ERRORS[error])

    text = complaint(lambda: attempt(url, 10**6, checkpoint=HASTY, chief_only_hooks=[Breaks()]), ms.SaveError)
    assert "leaky://***@" in text
    store_fails()
    for name, data in objects(url).items():
        assert_clean(name, data)


def test_a_clean_up_and_a_heartbeat_that_fail(url, store_fails, monkeypatch, caplog):
    monkeypatch.setattr("monsess.checkpoint.ownership.INTERVAL_SECS", 0.05)

    class Breaks(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            store_fails("delete")
            if run_context.global_step == 3:
                ticks.wait_until(lambda: "Could not clean up" in caplog.text)
                # No save is in flight: after its commit.json is there, it still is read back.
                ticks.wait_until(lambda: not run_context.session._saving._saver._busy())
                assert ms.CheckpointStore(url, OPTIONS).steps()[-1] == 2
                store_fails("read", "write", "delete")
                ticks.wait_until(lambda: "heartbeat failed" in caplog.text)
                store_fails("delete")

    attempt(url, 4, save_checkpoint_steps=1, chief_only_hooks=[Breaks()])


def test_damage_and_a_second_run(url, store_fails, caplog):
    attempt(url, 4, keep=ms.KeepLast(9))
    store = LeakyFileSystem()
    name = next(name for name in store.find(url) if "/4/default/d/" in name)
    store.pipe_file(name, b"damage")
    with ms.MonitoredTrainingSession(ticks.init_fn, checkpoint_dir=url, storage_options=OPTIONS):
        assert "Damaged checkpoint in leaky://***@" in caplog.text
        assert "leaky://***@" in complaint(lambda: attempt(url), ms.DirectoryInUseError)
    strict = ms.CheckpointOptions(strict=True)
    complaint(lambda: attempt(url, checkpoint=strict), ms.DamagedCheckpointError)
    complaint(lambda: ms.load_checkpoint(url, 4, OPTIONS), ms.DamagedCheckpointError)


@pytest.mark.parametrize("kind", ["list", "read"])
def test_looking_that_fails(url, store_fails, kind):
    attempt(url, 2)
    store_fails(kind)
    store = ms.CheckpointStore(url, OPTIONS)
    for call in (
        lambda: ms.latest_checkpoint(url, OPTIONS),
        lambda: ms.load_checkpoint(url, storage_options=OPTIONS),
        lambda: store.steps(),
        lambda: store.delete(2),
        lambda: store.pin(2),
        lambda: attempt(url, scaffold=None),
    ):
        assert "leaky://***@" in complaint(call)


@pytest.mark.parametrize("password", [PASSWORD, SLASHED])
@pytest.mark.parametrize("wrong", ["unheardof://{}@host/run", "leaky:/{}@host/run", "sftp://{}@:port:/x"])
def test_urls_that_cannot_be(wrong, password, capfd):
    url = wrong.format(f"{USER}:{password}")
    complaint(lambda: attempt(url), Exception)
    complaint(lambda: ms.latest_checkpoint(url, OPTIONS), Exception)
    assert main(["ls", url]) in (2, 3)
    assert "monsess: " in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["list", "read", "write"])
def test_a_password_with_slashes(kind, store_fails, monkeypatch, capfd):
    url = f"leaky://{USER}:{SLASHED}@{uuid.uuid4().hex}/run"

    class Breaks(ms.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.global_step == 5:
                store_fails(kind, "delete")

    attempt(url, 4)
    store = ms.CheckpointStore(url, OPTIONS)
    assert store.steps() == [4]
    assert_clean("the store", f"{store!r} {store} {store.url}")
    for name, data in objects(url).items():
        assert_clean(name.rpartition("/")[2], data)
    text = complaint(lambda: attempt(url, 10**6, checkpoint=HASTY, chief_only_hooks=[Breaks()]))
    assert "leaky://***@" in text
    store_fails(kind)
    if kind != "write":
        assert "leaky://***@" in complaint(lambda: attempt(url))
    monkeypatch.setenv("MONSESS_STORAGE_OPTIONS", json.dumps(OPTIONS))
    monkeypatch.setenv("MONSESS_DEBUG", "1")
    for command in COMMANDS:
        called(command.name, url, *command.example)
        called(command.name, url, *command.example, "--json")
        assert main([command.name, url, "--no-such-thing", url]) == 2
    assert "leaky://***@" in "".join(capfd.readouterr())


# ---- the command line


def called(*arguments: str) -> int:
    assert_clean("a process", command_lines())
    return main(list(arguments))


@pytest.mark.parametrize("form", ["table", "json"])
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.takes_url], ids=lambda c: c.name)
def test_every_command(command, form, url, store_fails, monkeypatch, caplog, capfd):
    attempt(url, 4, keep=ms.KeepLast(9))
    monkeypatch.setenv("MONSESS_STORAGE_OPTIONS", json.dumps(OPTIONS))
    monkeypatch.setenv("MONSESS_DEBUG", "1")
    arguments = [command.name, url, *command.example, *(["--json"] if form == "json" else [])]
    assert called(*arguments) in (0, 1)
    said = capfd.readouterr()
    assert_clean("the command", said.out + said.err)
    assert said.out
    for name, data in objects(url).items():
        assert_clean(name, data)
    if command.name != "check-store":  # it goes through all of them by itself, one after the other
        for kind in ("list", "read", "write", "delete"):
            store_fails(kind)
            called(*arguments)
    store_fails("list", "read", "write", "delete")
    assert called(*arguments) in (1, 3)
    assert "***" in "".join(capfd.readouterr())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_a_command_that_is_called_wrongly(command, url, monkeypatch, tmp_path):
    assert called(command.name, url, "--no-such-thing", url) == 2
    assert called(command.name, url, *command.example, url, url) == 2
    monkeypatch.setenv("MONSESS_STORAGE_OPTIONS", json.dumps(OPTIONS)[:-1])
    assert called(command.name, url, *command.example) == 2
    (tmp_path / "options.json").write_text(repr(OPTIONS))
    assert called(command.name, url, *command.example, "--storage-options", str(tmp_path / "options.json")) == 2


# ---- in processes of their own

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from monsess.testing import emulate_devices
emulate_devices(4)
import logging
logging.basicConfig(level=logging.DEBUG)
import smoke_run
smoke_run.train(**json.load(sys.stdin))
"""


def test_a_process(tmp_path):
    url = f"faulty://{USER}:{PASSWORD}@store/run"
    given = json.dumps({"url": url, "options": {**OPTIONS, "root": str(tmp_path)}})
    support = os.path.dirname(smoke_run.__file__)
    child = [sys.executable, "-W", "error", "-c", PROGRAM, support]
    trained = subprocess.run(child, input=given, capture_output=True, text=True, timeout=120)
    assert trained.returncode == 0, trained.stderr
    listed = subprocess.run(
        [sys.executable, "-m", "monsess", "ls", url],
        env={**os.environ, "MONSESS_STORAGE_OPTIONS": json.dumps({**OPTIONS, "root": str(tmp_path)})},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert listed.returncode == 0, listed.stderr
    assert str(smoke_run.LAST_STEP) in listed.stdout
    for said in (trained, listed):
        assert_clean("stdout", said.stdout)
        assert_clean("stderr", said.stderr)
    for path in tmp_path.rglob("*"):
        assert_clean("a name", str(path.relative_to(tmp_path)))
        if path.is_file():
            assert_clean(str(path), path.read_bytes())


def test_the_store_of_these_tests_does_leak(url, store_fails):
    """So that the tests above show something."""
    store_fails("list")
    filesystem, root = fsspec.core.url_to_fs(url, **OPTIONS)
    with pytest.raises(PermissionError) as raised:
        filesystem.ls(root)
    text = "".join(traceback.format_exception(raised.value)).encode()
    given = [*_PLAIN[:1], *_PLAIN[2 : _PLAIN.index(SLASHED)]]
    assert USER.encode() in text
    assert all(any(write(secret).encode() in text for write in _WRITTEN) for secret in given)
    assert repr(PRIVATE_KEY)[1:-1].encode() in text
    assert repr(QUOTED)[1:-1].encode() in text
