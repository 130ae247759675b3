"""Locks end with their process, also where a child that was forked lives on; and a child makes its own values."""

import fcntl
import os
from contextlib import suppress

import pytest
from forked import in_child

from tarshards.storage.claims import Claims
from tarshards.storage.locks import NoLocksError, is_locked, lock, locked, release, sweep

FLAGS = os.O_RDWR | os.O_CREAT


def test_a_lock_is_held_until_it_is_released(tmp_path):
    path = f"{tmp_path}/file"
    assert not is_locked(path), "there is none"
    held = lock(path, FLAGS)
    assert is_locked(path)
    with pytest.raises(BlockingIOError):
        lock(path, FLAGS)
    release(held)
    assert not is_locked(path)


def test_who_waits_for_a_file_that_is_replaced_locks_the_new_one(tmp_path):
    path, waited = f"{tmp_path}/file", []
    held = lock(path, FLAGS)

    def wait():
        waited.append(os.stat(path).st_ino)
        os.unlink(path)

    found = lock(path, FLAGS, wait)
    assert len(waited) == 1
    assert os.path.samestat(os.stat(path), os.fstat(found))
    release(held)
    release(found)


def test_who_waits_may_give_up(tmp_path):
    path = f"{tmp_path}/file"
    held, before = lock(path, FLAGS), len(os.listdir("/proc/self/fd"))

    def wait():
        raise TimeoutError

    with pytest.raises(TimeoutError):
        lock(path, FLAGS, wait)
    assert len(os.listdir("/proc/self/fd")) == before
    release(held)


def test_a_file_that_nobody_holds_is_swept(tmp_path):
    path = f"{tmp_path}/file"
    held = lock(path, FLAGS)
    assert not sweep(path)
    release(held)
    assert sweep(path, lambda descriptor: False)
    assert os.path.exists(path)
    assert sweep(path)
    assert not os.path.exists(path)
    assert sweep(path), "it is gone"
    assert not sweep(str(tmp_path)), "not a file"


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    path = f"{tmp_path}/file"
    with pytest.raises(NoLocksError, match="No locks available"):
        lock(path, FLAGS)
    assert not sweep(path)
    assert not is_locked(path)
    release(lock(path, FLAGS, optional=True))


def open_files():
    """The files that this process has open, each by its number and its path."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@pytest.mark.forks
def test_a_child_that_was_forked_holds_no_lock_of_its_parent(tmp_path, monkeypatch):
    """Its parent may die first, and then nobody would release them."""
    monkeypatch.chdir(tmp_path)
    before = open_files()
    with Claims() as claims, locked("."):
        claims.take("a.tar")
        held = open_files() - before
        assert len(held) == 2
        assert in_child(lambda: not open_files() & held) == 0

        def claim():
            with pytest.raises(OSError, match="writes it"):
                Claims().take("a.tar")
            return True

        assert in_child(claim) == 0
