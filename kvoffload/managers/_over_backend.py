"""Construction and views shared by the two managers over a pluggable backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, Literal

from kvoffload._checks import check_bool
from kvoffload.backends.base import Backend
from kvoffload.policies import registry
from kvoffload.types import Spec_co


class OverBackend(Generic[Spec_co]):
    """Build a manager over a ``Backend``, in both twins.

    A user's own backend keeps its status objects, which only the Python policy can hold: over one,
    the policy is the Python twin, whichever twin the manager is.
    """

    __slots__ = ()

    _policy_name: ClassVar[str]
    _twin: Literal["py", "c"]
    _backend_class: type[Backend[Any]]
    _setup: Callable[..., None]
    _backend_object: Backend[Spec_co]
    policy: Any

    def _build(self, backend: Backend[Spec_co], enable_events: bool) -> None:
        """Check the arguments of the constructor, and join the parts."""
        if not isinstance(backend, Backend):
            raise TypeError(f"backend must be a Backend, got {type(backend).__name__}")
        enable_events = check_bool("enable_events", enable_events)
        _ = backend.block_size, backend.medium  # an error now rather than in the first event
        twin = self._twin if type(backend) is self._backend_class else "py"
        policy_class = registry.load(registry.entry(self._policy_name), twin)
        policy = policy_class(cache_capacity=backend.get_num_free_blocks())
        self._setup(policy, backend, enable_events)

    @property
    def backend(self) -> Backend[Spec_co]:
        """The backend that holds the blocks."""
        return self._backend_object
