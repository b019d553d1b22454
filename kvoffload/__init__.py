"""Offload managers for the KV cache of LLM engines: which block stays, which leaves, and when.

``IMPLEMENTATION`` is ``"compiled"`` or ``"python"``; the environment variable
``KVOFFLOAD_PURE_PYTHON`` chooses (see the reference).
"""

from . import _interrupts as _interrupts  # first: the other imports take a while

# isort: split
import typing as _typing

from ._implementation import IMPLEMENTATION as IMPLEMENTATION
from .backends.base import Backend as Backend
from .backends.cpu import CPUBackend as CPUBackend
from .errors import BackendError as BackendError
from .errors import BlockNotFoundError as BlockNotFoundError
from .errors import BlockNotPinnedError as BlockNotPinnedError
from .errors import BlockNotReadyError as BlockNotReadyError
from .errors import OffloadError as OffloadError
from .errors import PolicyError as PolicyError
from .errors import RefCountOverflowError as RefCountOverflowError
from .errors import RequestFinishedError as RequestFinishedError
from .managers.arc import ARCOffloadingManager as ARCOffloadingManager
from .managers.base import OffloadingManager as OffloadingManager
from .managers.base import Request as Request
from .managers.cpu import CPUOffloadingManager as CPUOffloadingManager
from .managers.lru import LRUOffloadingManager as LRUOffloadingManager
from .policies.base import CachePolicy as CachePolicy
from .policies.builtin import *  # every policy of the table
from .types import BlockHash as BlockHash
from .types import BlockIDsLoadStoreSpec as BlockIDsLoadStoreSpec
from .types import BlockStatus as BlockStatus
from .types import CPULoadStoreSpec as CPULoadStoreSpec
from .types import GPULoadStoreSpec as GPULoadStoreSpec
from .types import Hints as Hints
from .types import LoadStoreSpec as LoadStoreSpec
from .types import OffloadingEvent as OffloadingEvent
from .types import PrepareStoreOutput as PrepareStoreOutput

__version__ = "0.5.0"

if not _typing.TYPE_CHECKING:  # type checkers infer public names from the imports
    __all__ = [
        name
        for name, value in vars().items()
        if not (name.startswith("_") or isinstance(value, type(_typing)))
    ]
    __all__ += ["__version__"]
