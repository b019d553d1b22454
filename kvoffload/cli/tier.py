"""``kvoffload tier``: inspect, verify and delete blocks that tiers keep on disks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import click

from kvoffload.advise.units import bytes_text, percent_text
from kvoffload.errors import describe
from kvoffload.traces import MissingExtraError

from ._group import Group
from ._options import examples, json_option, quiet_option
from ._terminal import Column, note, print_json, print_tables, progress_bar

if TYPE_CHECKING:
    from kvoffload.tiers.local.slab import SlabFolder, Verdict

LONGEST_MODEL = 80
"""Most characters shown of a model's name, which is not trusted."""


@click.group(
    cls=Group, epilog=examples("kvoffload tier info /nvme/kv", "kvoffload tier verify /nvme/kv")
)
def tier() -> None:
    """Inspect, verify and delete blocks that tiers keep on disks."""


@tier.command(epilog=examples("kvoffload tier info /nvme/kv --json"))
@click.argument("path")
@json_option
def info(path: str, *, as_json: bool) -> None:
    """List the slabs in PATH and their contents.

    PATH is the folder that a tier was opened with, or the folder of one slab in it. A slab may be
    in use.
    """
    with _slabs() as slab:
        found = slab.find_slabs(path)
    if as_json:
        print_json({"path": path, "slabs": [_as_object(slab) for slab in found]})
        return
    rows = [_as_row(slab) for slab in found]
    titles = ("model", "blocks", "of", "block size", "used", "on disk", "in use by")
    columns = [
        Column(title, [*cells], numeric=title not in {"model", "in use by"})
        for title, cells in zip(titles, zip(*rows, strict=True), strict=True)
    ]
    print_tables([path], [_names(found)], [[column] for column in columns])


@tier.command(epilog=examples("kvoffload tier verify /nvme/kv"))
@click.argument("path")
@json_option
@quiet_option
@click.pass_context
def verify(ctx: click.Context, path: str, *, as_json: bool, quiet: bool) -> None:
    """Compare every block of the slabs in PATH with its seal.

    Nothing is changed: a tier drops a corrupt block when it meets it. The exit code is 1 if a block
    is corrupt or a slab is in use.
    """
    with _slabs() as slab:
        found = slab.find_slabs(path)
        verdicts = list(_verdicts(slab, found, quiet=quiet))
    if as_json:
        rows = [
            {
                "folder": str(slab.folder),
                "sound": verdict.sound,
                "corrupt": [key.hex() for key in verdict.corrupt],
            }
            for slab, verdict in zip(found, verdicts, strict=True)
        ]
        print_json({"path": path, "slabs": rows})
    else:
        columns = [
            Column("sound", [f"{verdict.sound:,}" for verdict in verdicts]),
            Column("corrupt", [f"{len(verdict.corrupt):,}" for verdict in verdicts]),
        ]
        print_tables([path], [_names(found)], [[column] for column in columns])
    ctx.exit(1 if any(verdict.corrupt for verdict in verdicts) else 0)


def _verdicts(slab: ModuleType, found: list[SlabFolder], *, quiet: bool) -> Iterator[Verdict]:
    total = sum(each.num_blocks for each in found)
    with progress_bar("verifying", total, quiet=quiet, unit="blocks") as progress:
        before = 0

        def show(done: int) -> None:
            if progress is not None:
                progress(before + done)

        for each in found:
            yield slab.verify_slab(each.folder, show)
            before += each.num_blocks


@tier.command(epilog=examples("kvoffload tier forget /nvme/kv --yes"))
@click.argument("path")
@click.option("--yes", is_flag=True, help="Delete without asking.")
@quiet_option
def forget(path: str, *, yes: bool, quiet: bool) -> None:
    """Delete the slabs in PATH; none may be in use."""
    with _slabs() as slab:
        found = slab.find_slabs(path)
    if not yes:
        size = bytes_text(sum(each.disk_bytes for each in found))
        blocks = sum(each.num_blocks for each in found)
        names = ", ".join(str(each.folder) for each in found)
        click.confirm(f"Delete {blocks:,} blocks, {size}, in {names}?", abort=True, err=True)
    with _slabs() as slab:
        freed = sum(slab.remove_slab(each.folder) for each in found)
    note(f"{bytes_text(freed)} freed", quiet=quiet)


@contextlib.contextmanager
def _slabs() -> Iterator[ModuleType]:
    """Provide the module for slabs; print its errors as one line and end with exit code 1."""
    try:
        from kvoffload.tiers import TierError
        from kvoffload.tiers.local import slab
    except ImportError as error:
        raise MissingExtraError(str(error), name=error.name) from error
    try:
        yield slab
    except TierError as error:
        raise OSError(str(error)) from error


def _names(slabs: list[SlabFolder]) -> Column:
    return Column("slab", [slab.folder.name for slab in slabs], numeric=False)


def _as_row(slab: SlabFolder) -> tuple[str, ...]:
    model = slab.namespace.get("model", "?")
    model = model if isinstance(model, str) else describe(model)
    if len(model) > LONGEST_MODEL:
        model = f"{model[: LONGEST_MODEL - 3]}..."
    holder = f"process {slab.pid}" if slab.pid else "a process"
    holder = "nobody" if slab.pid is None else holder
    if slab.header is None:
        return model, "0", "?", "?", "?", bytes_text(slab.disk_bytes), holder
    return (
        model,
        f"{slab.num_blocks:,}",
        f"{slab.header.num_slots:,}",
        bytes_text(slab.header.block_bytes),
        percent_text(slab.num_blocks / slab.header.num_slots),
        bytes_text(slab.disk_bytes),
        holder,
    )


def _as_object(slab: SlabFolder) -> dict[str, object]:
    """Return a slab as the object that ``--json`` prints."""
    header = slab.header
    return {
        "folder": str(slab.folder),
        "blocks": slab.num_blocks,
        "slots": header.num_slots if header else None,
        "block_bytes": header.block_bytes if header else None,
        "stale": slab.num_stale,
        "disk_bytes": slab.disk_bytes,
        "pid": slab.pid,
        "damaged": header is None,
        "namespace": slab.namespace,
    }
