"""The base of managers of the chosen implementation, and of those over a pluggable backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload._checks import check_bool, check_instance
from kvoffload._implementation import IMPLEMENTATION
from kvoffload.backends.base import Backend
from kvoffload.policies import registry
from kvoffload.types import Spec_co

from ._user_parts import UserBackend

__all__ = ["BackendManager", "Manager"]

if TYPE_CHECKING or IMPLEMENTATION == "python":
    from ._manager_py import Manager
else:
    from ._manager_c import Manager


class BackendManager(Manager[Spec_co]):
    """The base of managers over a pluggable backend."""

    def _open(self, policy_name: str, backend: Backend[Spec_co], enable_events: bool) -> None:
        check_instance("backend", backend, Backend, "a Backend")
        enable_events = check_bool("enable_events", enable_events)
        _ = backend.block_size, backend.medium  # fail now rather than in the first event
        # A user's own backend keeps its status objects, which only the Python policy can hold.
        twin = self._twin if type(backend) is self._backend_class else "py"
        num_free = UserBackend(backend)._num_free()
        policy = registry.parse(policy_name).build(twin, num_free)
        self._setup(policy, backend, enable_events)

    @property
    def backend(self) -> Backend[Spec_co]:
        """The backend that holds the blocks."""
        return self._skeleton._backend_object
