"""``kvoffload tier``: what it prints, its exit codes, one line for what goes wrong."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple
from importlib.util import find_spec
from pathlib import Path

import pytest

for module in ("click", "rich", "msgspec"):
    pytest.importorskip(module, reason="the command needs the cli extra")

from kvoffload.cli.tier import _shown  # noqa: E402
from kvoffload.testing.tiers import run as run_job  # noqa: E402
from kvoffload.tiers import DirectoryTier, FileTier, Namespace  # noqa: E402
from kvoffload.tiers.generation import Generation  # noqa: E402
from kvoffload.tiers.local.slab import find_slabs  # noqa: E402
from kvoffload.tiers.remote.directory import delete_blocks  # noqa: E402
from tests.cli.conftest import run_here  # noqa: E402
from tests.isolated.scripts import run_python  # noqa: E402
from tests.tiers.inside import attached  # noqa: E402

SMALL = Namespace("small", 4096, engine="test")
LARGE = Namespace("large", 16_384)


@pytest.fixture
def slabs(tmp_path: Path) -> Path:
    """Return a folder with two slabs, 12 blocks in each."""
    for namespace in (SMALL, LARGE):
        tier = FileTier(tmp_path / "kv", 48 * namespace.block_bytes, namespace=namespace)
        region = attached(tier, 12)
        region.array[:] = 5
        run_job(tier, tier.put([b"%d" % number for number in range(12)], range(12)))
        tier.close()
    return tmp_path / "kv"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command: exit code, output, errors."""
    monkeypatch.delenv("COLUMNS", raising=False)
    return lambda *arguments: astuple(run_here("tier", *arguments))


def flip(slab: Path, slot: int, block_bytes: int) -> None:
    with (slab / "blocks.dat").open("r+b") as file:
        file.seek(slot * block_bytes + 100)
        file.write(b"\x04")


def test_info(slabs: Path, command) -> None:
    code, out, err = command("info", slabs)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == str(slabs)
    head = "slab model blocks of block size used on disk in use by"
    assert lines[2].split() == head.split()
    rows = {line.split()[1]: line.split() for line in lines[4:]}
    fingerprint = SMALL.fingerprint.hex()
    assert rows["small"][:8] == [fingerprint, *["small", "12", "48", "4", "KiB", "25.0", "%"]]
    assert rows["large"][2:6] == ["12", "48", "16", "KiB"]
    assert rows["large"][-1] == "nobody"
    code, out, _ = command("info", slabs, "--json")
    assert code == 0
    (small,) = (each for each in json.loads(out)["slabs"] if each["block_bytes"] == 4096)
    assert (small["blocks"], small["slots"], small["stale"]) == (12, 48, 0)
    assert (small["pid"], small["damaged"]) == (None, False)
    assert small["namespace"]["engine"] == "test"
    assert small["disk_bytes"] >= 48 * 4096
    code, out, _ = command("info", f"slab:{small['folder']}", "--json")
    assert [slab["folder"] for slab in json.loads(out)["slabs"]] == [small["folder"]]


def test_info_of_a_directory(tmp_path: Path, command) -> None:
    """By model and generation, whose names only their engines know."""
    with DirectoryTier(tmp_path, 2**24, namespace=SMALL) as tier:
        attached(tier, 8)
        for generation, count in (("", 8), ("step 5", 3)):
            tier.forget(generation)
            run_job(tier, tier.put([b"%d" % number for number in range(count)], range(count)))
    for action in (["info"], ["verify"], ["delete", "--all", "--yes"]):
        code, _, err = command(*action, tmp_path)
        said = f"kvoffload: {tmp_path}: no slab is here; dir:{tmp_path} is a shared directory\n"
        assert (code, err) == (1, said)
    (tmp_path / ("f" * 32)).symlink_to(tmp_path)  # not followed
    number = f"{Generation.of('step 5').number:016x}"
    code, out, err = command("info", f"dir:{tmp_path}")
    assert (code, err) == (0, "")
    fingerprint = SMALL.fingerprint.hex()
    assert [line.split() for line in out.splitlines()[4:]] == [
        [fingerprint, "small", "-", "8", "64", "KiB"],
        [fingerprint, "small", number, "3", "24", "KiB"],
    ]
    rows = json.loads(command("info", f"dir:{tmp_path}", "--json")[1])["generations"]
    assert [(row["generation"], row["blocks"], row["disk_bytes"]) for row in rows] == [
        ("0" * 16, 8, 65_536),
        (number, 3, 24_576),
    ]
    assert rows[0]["namespace"]["engine"] == "test"
    namespace = tmp_path / fingerprint
    (namespace / ("1" * 16)).write_text("no folder")
    (namespace / ("2" * 16)).symlink_to(namespace / number)
    assert command("info", f"dir:{tmp_path}")[1] == out
    under_way = delete_blocks(f"dir:{tmp_path}", {}, None)
    assert next(under_way) == (8, 65_536)
    for said in ("3 blocks deleted, 24 KiB", "0 blocks deleted, 0 B: no block of generation"):
        code, _, err = command("delete", f"dir:{tmp_path}", "--generation", number, "--yes")
        assert (code, err.startswith(f"note: {said}")) == (0, True), err
    assert list(under_way) == []
    assert command("delete", f"dir:{tmp_path}", "--all", "--yes")[0] == 0
    assert {path.name for path in namespace.iterdir()} >= {"1" * 16, "2" * 16, "namespace.json"}
    said = f"kvoffload: dir:{tmp_path}: no blocks are here\n"
    assert command("info", f"dir:{tmp_path}")[::2] == (1, said)


def test_verify(slabs: Path, command) -> None:
    code, out, err = command("verify", f"slab:{slabs}")
    assert (code, err) == (0, "")
    assert [line.split()[1:] for line in out.splitlines()[4:]] == [["12", "0"]] * 2
    slab = slabs / SMALL.fingerprint.hex()
    before = (slab / "slots.tbl").read_bytes()
    flip(slab, 3, 4096)
    flip(slab, 11, 4096)
    code, out, _ = command("verify", slabs)
    assert code == 1
    assert sorted(line.split()[1:] for line in out.splitlines()[4:]) == [["10", "2"], ["12", "0"]]
    code, out, _ = command("verify", slab, "--json")
    assert code == 1
    assert sorted(json.loads(out)["slabs"][0]["corrupt"]) == [b"11".hex(), b"3".hex()]
    assert (slab / "slots.tbl").read_bytes() == before, "nothing is changed"


@pytest.mark.parametrize("how", ["fails", "ends early"])
def test_a_block_that_cannot_be_read_is_not_sound(
    how: str, slabs: Path, command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if len(views[0]) < 4096:  # of the table
            return read(fd, views, offset)
        if not first:
            first.append(offset)
        elif how == "fails":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        else:  # what is missing is what the block before had there
            views = [view[: len(view) - 1] for view in views]
        return read(fd, views, offset)

    first: list[int] = []
    read = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    code, out, err = command("verify", slabs / SMALL.fingerprint.hex())
    assert (code, err) == (1, "")
    assert out.splitlines()[-1].split()[1:] == ["1", "11"]


def test_the_slabs_beside_a_damaged_one_are_verified(slabs: Path, command) -> None:
    folder = slabs / SMALL.fingerprint.hex()
    table = folder / "slots.tbl"
    for damage, said in (
        (lambda: table.write_bytes(b""), f"{folder}: the table is damaged, and no block can"),
        (table.unlink, f"{table}: No such file"),
    ):
        damage()
        code, out, err = command("verify", slabs)
        assert (code, err.startswith(f"kvoffload: {said}"), err.count("\n")) == (1, True, 1)
        assert out.split()[-3:] == [LARGE.fingerprint.hex(), "12", "0"]
        assert command("verify", slabs, "--json")[::2] == (code, err)


def test_delete(slabs: Path, command) -> None:
    one = slabs / SMALL.fingerprint.hex()
    code, out, err = command("delete", one, "--all", "--yes")
    assert (code, out) == (0, "")
    assert err.startswith("note: 12 blocks deleted, ")
    assert not one.exists()
    assert len(find_slabs(slabs)) == 1
    for answer in ("n\n", ""):
        arguments = ("tier", "delete", f"slab:{slabs}", "--all")
        done = run_python("-m", "kvoffload", *arguments, input=answer)
        assert done.returncode == 1
        assert done.stderr.splitlines() == [
            f"Delete all blocks at slab:{slabs}? [y/N]: ",
            "kvoffload: nothing deleted; --yes deletes without asking",
        ]
    code, _, err = command("delete", slabs, "--generation", "another", "--yes")
    said = "note: 0 blocks deleted, 0 B: no block of generation 'another' is there\n"
    assert (code, err) == (0, said)
    assert command("delete", slabs, "--generation", "", "--yes", "--quiet") == (0, "", "")
    assert list(slabs.iterdir()) == []
    code, _, err = command("info", slabs)
    assert (code, err) == (1, f"kvoffload: {slabs}: no slab is here\n")


def test_delete_an_empty_slab_of_a_generation(tmp_path: Path, command) -> None:
    with FileTier(tmp_path, 48 * 4096, namespace=SMALL, generation="a") as tier:
        folder = tier.folder
    code, _, err = command("delete", tmp_path, "--generation", "a", "--yes")
    assert (code, folder.exists()) == (0, False)
    assert err.endswith(": the empty slab of generation 'a' was deleted\n")


def test_a_slab_of_an_older_version(slabs: Path, command) -> None:
    """A tier opens it empty; nothing is damaged."""
    slab = slabs / SMALL.fingerprint.hex()
    with (slab / "slots.tbl").open("r+b") as table:
        for copy in (0, 2048):
            table.seek(copy + 8)
            table.write((1).to_bytes(4, "little"))
    said = f"{slab}: its blocks are of kvoffload 0.4, and a tier opens it empty\n"
    code, _, err = command("info", slab)
    assert (code, err) == (0, f"note: {said}")
    (found,) = json.loads(command("info", slab, "--json")[1])["slabs"]
    assert (found["damaged"], found["older"], found["blocks"]) == (False, True, 0)
    assert command("verify", slab) == (1, "", f"kvoffload: {said}")
    with FileTier(slabs, 48 * 4096, namespace=SMALL) as tier:
        assert tier.num_restored == 0


def test_a_deletion_that_names_no_blocks_deletes_none(slabs: Path, command) -> None:
    """What else goes wrong in one line is in ``tests/cli/golden.txt``."""
    for arguments in ([], ["--all", "--generation", "a"]):
        assert command("delete", slabs, *arguments)[0] == 2
    assert len(find_slabs(slabs)) == 2


def test_no_password_is_printed(command) -> None:
    said = "redis://127.0.0.1:1: ConnectionError" if find_spec("redis") else "kvoffload[redis]"
    code, out, err = command("delete", "redis://u:secret@127.0.0.1:1", "--all", "--yes")
    assert (code in (1, 2), out) == (True, "")
    assert said in err
    assert "secret" not in err
    assert _shown("redis://user:secret@host/0?ca=x") == "redis://host/0"
    assert _shown("dir:/mnt/a@b") == "dir:/mnt/a@b"


def test_delete_blocks_whose_table_is_gone(slabs: Path, command) -> None:
    """As after a deletion that was killed, or a `forget` that the disk has refused."""
    slab, other = (slabs / each.fingerprint.hex() for each in (SMALL, LARGE))
    for each in (slab, other):
        (each / "slots.tbl").unlink()
    (found,) = json.loads(command("info", slab, "--json")[1])["slabs"]
    assert (found["damaged"], found["blocks"]) == (True, 0)
    assert command("delete", slab, "--all", "--yes")[0] == 0
    assert list(slabs.iterdir()) == [other]
    (slabs / "blocks.dat").touch()  # a stranger's
    assert command("delete", slabs, "--all", "--yes")[0] == 0
    assert command("delete", slabs, "--all", "--yes")[0] == 1
    assert list(slabs.iterdir()) == [slabs / "blocks.dat"]


def test_delete_a_directory_that_an_engine_uses(tmp_path: Path, command, monkeypatch) -> None:
    """What an engine stores meanwhile stays, and the rest is deleted."""

    def rmdir(path: str, *, dir_fd: int) -> None:
        if "late" not in path and not late:
            late.append(path)
            os.mkdir(f"{path}/late", dir_fd=dir_fd)
        remove(path, dir_fd=dir_fd)

    late: list[str] = []
    remove = os.rmdir
    with DirectoryTier(tmp_path, 2**24, namespace=SMALL, ack="stored") as tier:
        attached(tier, 8)
        for generation in ("", "step 5"):
            tier.forget(generation)
            run_job(tier, tier.put([b"1", b"2"], [0, 1]))
    monkeypatch.setattr(os, "rmdir", rmdir)
    code, out, err = command("delete", f"dir:{tmp_path}", "--all", "--yes")
    assert (code, out, err) == (0, "", "note: 4 blocks deleted, 32 KiB\n")
    assert late
    assert list(tmp_path.rglob("*.kv")) == []


def test_a_slab_in_use(slabs: Path, command) -> None:
    with FileTier(slabs, 48 * 4096, namespace=SMALL) as tier:
        assert tier.num_restored == 12
        code, out, _ = command("info", tier.folder)
        assert (code, out.split()[-2:]) == (0, ["process", str(os.getpid())])
        for action in (["verify"], ["delete", "--all", "--yes"]):
            code, out, err = command(*action, tier.folder)
            assert (code, out) == (1, "")
            assert err == f"kvoffload: {tier.folder} is in use by process {os.getpid()}\n"
    assert find_slabs(slabs)


def test_damaged_slabs_are_shown_as_such(slabs: Path, command) -> None:
    slab = slabs / SMALL.fingerprint.hex()
    (slab / "slots.tbl").write_bytes(os.urandom(5000))
    (slab / "namespace.json").write_bytes(b"[" * 100_000)
    code, out, _ = command("info", slab, "--json")
    (found,) = json.loads(out)["slabs"]
    assert (code, found["damaged"], found["blocks"], found["namespace"]) == (0, True, 0, {})
    assert command("info", slab)[0] == 0
    assert command("delete", slab, "--all", "--yes")[0] == 0


def test_what_a_stranger_calls_a_model(slabs: Path, command) -> None:
    """Names without an end are cut, control characters escaped, what is nested deep is no name."""
    slab = slabs / SMALL.fingerprint.hex()
    for model in ("x" * 900_000, "\x1b[2J" * 1000, "\ud800" * 1000, ["y" * 900_000]):
        (slab / "namespace.json").write_text(json.dumps({"model": model}))
        code, out, err = command("info", slab)
        assert (code, err) == (0, "")
        assert len(out) < 2000
        assert "\x1b" not in out
        assert command("info", slab, "--json")[0] == 0
    for depth in (17, 500, 5000):
        (slab / "namespace.json").write_text('{"model":' + "[" * depth + "]" * depth + "}")
        for options in ([], ["--json"]):
            code, out, err = command("info", slab, *options)
            assert (code, err) == (0, "")
            assert "[[" not in out
