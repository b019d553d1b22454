"""The cost of importing the package, and of short commands."""

from __future__ import annotations


class Import:
    """Import in a fresh interpreter, without the interpreter's own start."""

    def timeraw_import(self) -> str:
        return "import kvoffload"

    def timeraw_import_replay(self) -> str:
        return "import kvoffload.replay"


RUN = """
import contextlib, io, sys
sys.argv = ["kvoffload", {arguments}]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    from kvoffload.__main__ import main
    main()
"""


class Command:
    """Commands in a fresh interpreter, without the interpreter's own start."""

    number = 1
    repeat = 4

    def timeraw_help(self) -> str:
        return RUN.format(arguments='"--help"')

    def timeraw_policies(self) -> str:
        return RUN.format(arguments='"policies"')

    def timeraw_replay(self) -> str:
        return RUN.format(arguments='"replay", "--policy", "lru"')
