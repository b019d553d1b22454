"""The lock of a slab ends with its holder, whatever children that one has forked, and when."""

import os
import time
from pathlib import Path

import pytest

from kvoffload.tiers import FileTier
from tests.tiers.inside import files_of

from .attack import (
    NAMESPACE,
    Universe,
    kill,
    open_slab,
    start,
)

pytestmark = pytest.mark.attack


def opens(path: Path) -> FileTier:
    return FileTier(path, 2**20, namespace=NAMESPACE)


@pytest.mark.parametrize("call", ["open", "fstat", "ftruncate", "posix_fallocate", "fsync"])
def test_a_fork_while_a_slab_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A child forked right after a system call of the opening keeps nothing locked."""
    made, children = getattr(os, call), []
    ready, tell = os.pipe()

    def live() -> None:
        os.write(tell, b"!")
        time.sleep(60)

    def forks(*arguments, **options):
        result = made(*arguments, **options)
        if len(children) < 3:
            children.append(start(live))
            assert os.read(ready, 1) == b"!"  # it runs
        return result

    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, call, forks)
            tier = opens(tmp_path)
        assert children
        tier.close()
        opens(tmp_path).close()
    finally:
        for child in children:
            kill(child)


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
