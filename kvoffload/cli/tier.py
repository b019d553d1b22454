"""``kvoffload tier``: inspect, verify and delete blocks that tiers keep on disks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from kvoffload._printable import printable
from kvoffload.advise.answer import Column, column
from kvoffload.advise.units import bytes_text, percent_text
from kvoffload.errors import MissingExtraError, OffloadError, describe

from ._group import Group
from ._options import examples, json_option, public, quiet_option
from ._terminal import note, print_json, print_tables, progress_bar

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
    in use. dir:PATH lists the blocks of a shared directory, by model and generation.
    """
    kind, place = _address(path, "dir", "slab")
    if kind == "dir":
        _show_directory(path, place, as_json=as_json)
        return
    with _slabs() as slab:
        found = slab.find_slabs(place)
    if as_json:
        print_json({"path": path, "slabs": [_as_object(slab) for slab in found]})
        return
    rows = [_as_row(slab) for slab in found]
    titles = ("model", "generation", "blocks", "of", "block size", "used", "on disk", "in use by")
    columns = [
        column(title, [*cells], numeric=title not in {"model", "generation", "in use by"})
        for title, cells in zip(titles, zip(*rows, strict=True), strict=True)
        if title != "generation" or set(cells) - {"-"}  # most have no name
    ]
    print_tables([path], [_names(each.folder for each in found)], [[column] for column in columns])
    for each in found:
        if each.is_older:
            note(f"{each.folder}: {slab.OLDER}")


def _show_directory(url: str, place: str, *, as_json: bool) -> None:
    """Print what a shared directory has."""
    with _slabs():
        from kvoffload.tiers.remote.directory import find_blocks

        found = list(find_blocks(place))
        if not found:
            raise OSError(f"{url}: no blocks are here")
    if as_json:
        print_json({"path": url, "generations": [kept._asdict() for kept in found]})
        return
    columns = [
        column("model", [_model_of(kept.namespace) for kept in found], numeric=False),
        column("generation", [_name_of(kept.generation) for kept in found], numeric=False),
        column("blocks", [f"{kept.blocks:,}" for kept in found]),
        column("on disk", [bytes_text(kept.disk_bytes) for kept in found]),
    ]
    first = column("namespace", [kept.fingerprint for kept in found], numeric=False)
    print_tables([url], [first], [[column] for column in columns])


@tier.command(epilog=examples("kvoffload tier verify /nvme/kv"))
@click.argument("path")
@json_option
@quiet_option
@click.pass_context
def verify(ctx: click.Context, path: str, *, as_json: bool) -> None:
    """Compare every block of the slabs in PATH with its seal.

    Nothing is changed: a tier drops a corrupt block when it meets it. The exit code is 1 if a block
    is corrupt, or a slab is damaged or in use; the others are verified.
    """
    _, place = _address(path, "slab")
    with _slabs() as slab:
        found = dict(_verdicts(slab, slab.find_slabs(place)))
    failed = [str(each) for each in found.values() if isinstance(each, OffloadError)]
    verdicts = {at: each for at, each in found.items() if not isinstance(each, OffloadError)}
    if as_json and verdicts:
        rows = [
            {
                "folder": str(folder),
                "sound": verdict.sound,
                "corrupt": [key.hex() for key in verdict.corrupt],
            }
            for folder, verdict in verdicts.items()
        ]
        print_json({"path": path, "slabs": rows})
    elif verdicts:
        columns = [
            column("sound", [f"{verdict.sound:,}" for verdict in verdicts.values()]),
            column("corrupt", [f"{len(verdict.corrupt):,}" for verdict in verdicts.values()]),
        ]
        print_tables([path], [_names(verdicts)], [[column] for column in columns])
    if failed:
        raise OSError("; ".join(failed))
    ctx.exit(1 if any(verdict.corrupt for verdict in verdicts.values()) else 0)


def _verdicts(
    slab: ModuleType, found: list[SlabFolder]
) -> Iterator[tuple[Path, Verdict | OffloadError]]:
    """Yield each folder and its verdict, or why there is none."""
    total = sum(each.num_blocks for each in found)
    with progress_bar("verifying", total, unit="blocks") as progress:
        before = 0

        def show(done: int) -> None:
            if progress is not None:
                progress(before + done)

        for each in found:
            try:
                yield each.folder, slab.verify_slab(each.folder, show)
            except OffloadError as error:
                yield each.folder, error
            except OSError as error:
                at = error.filename or each.folder
                yield each.folder, OffloadError(f"{at}: {error.strerror}")
            before += each.num_blocks


@tier.command(
    epilog=examples(
        "kvoffload tier delete /nvme/kv --all",
        "kvoffload tier delete dir:/mnt/kv --generation 'step 500'",
    )
)
@click.argument("url")
@click.option(
    "--generation",
    metavar="NAME",
    help="Delete the blocks of this generation; for dir:PATH also as tier info shows it.",
)
@click.option("--all", "everything", is_flag=True, help="Delete all blocks.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
@quiet_option
def delete(url: str, *, generation: str | None, everything: bool, yes: bool) -> None:
    """Delete blocks at URL, of all models.

    URL is the address of a tier, such as slab:/nvme/kv, dir:/mnt/kv, redis://host or
    s3://bucket/prefix, or the folder of slabs. No slab may be in use; engines that share a medium
    go on and miss what is deleted.
    """
    if everything == (generation is not None):
        raise click.UsageError("give one of --generation NAME and --all")
    with _slabs():
        from kvoffload.tiers.deletion import delete_blocks
    if _is_folder(url):
        if "?" in url:  # what follows would count as options, and another folder be deleted
            raise click.UsageError(f"URL must be a folder without ?, got {describe(url)}")
        url = f"slab:{url}"
    _address(url)
    what = "all blocks" if generation is None else f"the blocks of generation {generation!r}"
    if not yes and not _confirms(f"Delete {what} at {_shown(url)}?"):
        raise OSError("nothing deleted; --yes deletes without asking")
    with _slabs():
        try:
            deleted = delete_blocks(url, generation)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    text = f"{deleted.blocks:,} blocks deleted, {bytes_text(deleted.nbytes)}"
    if generation is not None and not deleted.blocks and deleted.nbytes:
        text += f": the empty slab of generation {generation!r} was deleted"
    elif generation is not None and not deleted.blocks:
        text += f": no block of generation {generation!r} is there"
    note(text)


def _is_folder(url: str) -> bool:
    return ":" not in url or url.startswith(("/", "."))


def _address(url: str, *kinds: str) -> tuple[str, str]:
    """Return the kind and the place of an address, or of a folder of slabs.

    Another kind than `kinds`, by default all that keep blocks, is a usage error.
    """
    if _is_folder(url):
        return "slab", url
    with _slabs():
        from kvoffload.tiers.deletion import KEEPING, read_address
    try:
        kind, place, _ = read_address(url, kinds or KEEPING)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return kind, place


def _confirms(question: str) -> bool:
    """Return whether the user says yes; the end of input means no."""
    try:
        answer = click.confirm(question, err=True)
    except click.Abort as error:
        if not isinstance(error.__context__, EOFError):  # Ctrl-C
            raise
        answer = False
    if not sys.stdin.isatty():  # no one has ended the question's line
        click.echo(err=True)
    return answer


def _shown(url: str) -> str:
    """Return an address without a password, on one line."""
    return printable(public(url).partition("?")[0])


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
    except FileNotFoundError as error:
        if error.filename is not None and Path(error.filename).is_file():
            raise OSError(f"{error.filename}: a file, and no folder of slabs") from error
        raise


def _names(folders: Iterable[Path]) -> Column:
    return column("slab", [folder.name for folder in folders], numeric=False)


def _name_of(generation: str) -> str:
    """Return the number of a generation, or that it has no name."""
    return generation if int(generation, 16) else "-"


def _model_of(namespace: dict[str, Any]) -> str:
    """Return the name of the model of a namespace, which is not trusted."""
    model = namespace.get("model", "?")
    model = model if isinstance(model, str) else describe(model)
    return f"{model[: LONGEST_MODEL - 3]}..." if len(model) > LONGEST_MODEL else model


def _as_row(slab: SlabFolder) -> tuple[str, ...]:
    model = _model_of(slab.namespace)
    holder = f"process {slab.pid}" if slab.pid else "a process"
    holder = "nobody" if slab.pid is None else holder
    if slab.header is None:
        return model, "?", "0", "?", "?", "?", bytes_text(slab.disk_bytes), holder
    return (
        model,
        slab.header.generation.name or "-",
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
        "generation": header.generation.name if header else None,
        "blocks": slab.num_blocks,
        "slots": header.num_slots if header else None,
        "block_bytes": header.block_bytes if header else None,
        "stale": slab.num_stale,
        "disk_bytes": slab.disk_bytes,
        "pid": slab.pid,
        "damaged": header is None and not slab.is_older,
        "older": slab.is_older,
        "namespace": slab.namespace,
    }
