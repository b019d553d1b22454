"""The lock of a slab ends with its holder, whatever children that one has forked, and when."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.tiers import FileTier
from tests.tiers.inside import files_of

from .attack import (
    NAMESPACE,
    Universe,
    _run,
    kill,
    new_disk,
    open_slab,
    open_when_free,
    start,
)

pytestmark = pytest.mark.attack


class Children:
    """Forked children that only live."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.ready, self.tell = os.pipe()

    def fork(self) -> None:
        """Fork one; it runs when this returns."""

        def live() -> None:
            os.write(self.tell, b"!")
            time.sleep(60)

        self.numbers.append(start(live))
        assert os.read(self.ready, 1) == b"!"

    def end(self) -> None:
        for child in self.numbers:
            kill(child)
        os.close(self.ready)
        os.close(self.tell)


@pytest.fixture
def children() -> Iterator[Children]:
    forked = Children()
    yield forked
    forked.end()


def opens(path: Path) -> FileTier:
    return FileTier(path, 2**20, namespace=NAMESPACE)


@pytest.mark.parametrize("call", ["open", "fstat", "ftruncate", "posix_fallocate", "fsync"])
def test_a_fork_while_a_slab_is_opened(
    tmp_path: Path,
    children: Children,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """A child forked right after a system call of the opening keeps nothing locked."""
    made = getattr(os, call)
    left = 3

    def forks(*arguments, **options):
        nonlocal left
        result = made(*arguments, **options)
        if left:
            left -= 1
            children.fork()
        return result

    with monkeypatch.context() as patched:
        patched.setattr(os, call, forks)
        tier = opens(tmp_path)
    assert children.numbers
    tier.close()
    opens(tmp_path).close()


def test_a_fork_after_a_close_that_a_disk_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.tiers.local.slab.tier.FORGET_S", 0.2)
    ready, tell = os.pipe()
    with new_disk(tmp_path, 16, "fsfreeze") as disk:

        def work() -> None:
            tier, _ = open_slab(disk / "kv", 8)
            _run("fsfreeze", "--freeze", disk)
            certain = tier.forget() or tier.close(0.1)
            grandchild = start(lambda: time.sleep(60))
            os.write(tell, b"%d %d" % (certain, grandchild))
            time.sleep(60)

        child = start(work)
        try:
            certain, grandchild = map(int, os.read(ready, 32).split())
        finally:
            _run("fsfreeze", "--unfreeze", disk)
        assert not certain
        kill(child)
        os.kill(grandchild, 0)  # it lives
        open_when_free(disk / "kv", 8)[0].close()  # it lets go when it runs for the first time
        os.kill(grandchild, signal.SIGKILL)
    os.close(ready)
    os.close(tell)


def test_descriptors_are_gone_when_a_slab_is_closed(tmp_path: Path) -> None:
    """So that no call can write to a file that has their number by then."""
    universe = Universe(8)
    tier, region = open_slab(tmp_path, 8)
    universe.put(tier, region)

    def work() -> None:
        files = files_of(tier)
        assert (files.data_fd, files.table_fd, files.held.fd) == (-1, -1, -1)

    _, status = os.waitpid(start(work), 0)
    assert os.waitstatus_to_exitcode(status) == 0, "in a child"
    files = files_of(tier)
    fds = [files.data_fd, files.table_fd, files.held.fd, files.held.files["lock"]]
    tier.close()
    assert (files.data_fd, files.table_fd, files.held.fd, files.held.files) == (-1, -1, -1, {})
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
