"""The cost of importing the package."""

from __future__ import annotations


class Import:
    """Import in a fresh interpreter, without the interpreter's own start."""

    def timeraw_import(self) -> str:
        return "import kvoffload"

    def timeraw_import_replay(self) -> str:
        return "import kvoffload.replay"
