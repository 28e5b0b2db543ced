"""Staging directories while other processes clean up after dead ones."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading

from monsess.checkpoint.staging import StagingDirectory, remove_dead


def test_one_that_is_taken_for_dead_before_it_is_locked_is_given_up_for_another(tmp_path, monkeypatch):
    make = tempfile.mkdtemp
    taken = []

    def made_and_taken(**where):
        path = make(**where)
        if not taken:
            taken.append(open(os.path.join(path, ".lock"), "wb"))  # noqa: SIM115
            fcntl.flock(taken[0], fcntl.LOCK_EX)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_taken)
    with StagingDirectory(str(tmp_path)) as staging:
        assert staging.path != os.path.dirname(taken[0].name)
        assert os.path.exists(os.path.join(staging.path, ".lock"))
    taken[0].close()
    remove_dead(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_many_are_made_while_somebody_cleans_up(tmp_path):
    done = threading.Event()

    def clean() -> None:
        while not done.is_set():
            remove_dead(str(tmp_path))

    cleaners = [threading.Thread(target=clean) for _ in range(2)]
    for cleaner in cleaners:
        cleaner.start()
    try:
        for _ in range(300):
            with StagingDirectory(str(tmp_path)) as staging:
                with open(os.path.join(staging.path, "data"), "wb") as file:
                    file.write(b"1")
                assert os.path.exists(file.name)
    finally:
        done.set()
        for cleaner in cleaners:
            cleaner.join()
    remove_dead(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
