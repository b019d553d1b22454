"""The built-in pool of the chosen implementation."""

from typing import TYPE_CHECKING

from kvoffload._implementation import IMPLEMENTATION

__all__ = ["CPUBackend"]

if TYPE_CHECKING or IMPLEMENTATION == "python":
    from ._cpu_py import CPUBackend
else:
    from ._cpu_c import CPUBackend
