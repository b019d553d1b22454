"""``python -m kvoffload``, and the entry point of the console script.

Before a command that runs managers, one line on standard error warns if the Python twins are used
without having been asked for, on a terminal and in the log of a job. ``--quiet`` suppresses the
warning, like every note.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from kvoffload import IMPLEMENTATION, cli
from kvoffload._implementation import VARIABLE, import_compiled

DRIVES_MANAGERS = ("replay", "sweep", "advise")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see `kvoffload.cli.main`."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in DRIVES_MANAGERS and "--quiet" not in given:
        _warn_of_python()
    return cli.main(given)


def _warn_of_python() -> None:
    if IMPLEMENTATION == "compiled" or os.environ.get(VARIABLE):
        return
    line = f"kvoffload: running in Python, tens of times slower: {_why_not_compiled()}"
    if sys.platform != "win32":  # where none is built
        line += f"; to build it, install a C compiler, then run: {_build_command()}"
    line += f"; {VARIABLE}=1 silences this line\n"
    if sys.stderr is not None:  # the caller may have closed it
        with contextlib.suppress(OSError):
            sys.stderr.write(line)
            sys.stderr.flush()


def _why_not_compiled() -> str:
    """Import the compiled modules again, and return the reason for the failure."""
    try:
        import_compiled()
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError):
            return f"the compiled implementation cannot be imported: {error}"
    return "the compiled implementation is not installed"


def _build_command() -> str:
    """Return the command that builds the extensions for this interpreter."""
    import shlex

    # Otherwise pip would use its cache, or keep the installed package.
    options = ["--force-reinstall", "--no-deps", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "install", *options, *_requirement()]
    return f"{VARIABLE}=0 {shlex.join(command)}"


def _requirement() -> list[str]:
    """Return pip's requirement for this package: its origin, or its name in an index."""
    import json
    from importlib import metadata
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    found = metadata.distributions(name="kvoffload")
    record = next(filter(None, (each.read_text("direct_url.json") for each in found)), None)
    source = json.loads(record) if record else None
    if source is None or source["url"].endswith(".whl"):
        return ["--no-binary", "kvoffload", "kvoffload"]
    if "vcs_info" in source:
        return [f"{source['vcs_info']['vcs']}+{source['url']}"]
    address = urlsplit(source["url"])
    place = url2pathname(address.path) if address.scheme == "file" else source["url"]
    return ["-e", place] if source.get("dir_info", {}).get("editable") else [place]


if __name__ == "__main__":
    sys.exit(main())
