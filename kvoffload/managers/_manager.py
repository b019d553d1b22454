"""The manager skeleton of the chosen implementation, and its policy over a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvoffload._implementation import IMPLEMENTATION
from kvoffload.backends.base import Backend
from kvoffload.policies import registry
from kvoffload.policies.base import CachePolicy

__all__ = ["Manager", "policy_over"]

if TYPE_CHECKING or IMPLEMENTATION == "python":
    from ._manager_py import Manager
else:
    from ._manager_c import Manager


def policy_over(backend: Backend[Any], name: str, manager: Manager[Any]) -> CachePolicy:
    """Build the policy of a manager over `backend`, with room for its free blocks.

    A user's own backend keeps its status objects, which only the Python policy can hold; over such
    a backend the policy is always the Python twin.
    """
    _ = backend.block_size, backend.medium  # fail now rather than in the first event
    twin = manager._twin if type(backend) is manager._backend_class else "py"
    return registry.parse(name).build(twin, backend.get_num_free_blocks())
