"""The balance of offloading: prefill saved by hits, against time that blocks take on the link."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from kvoffload.replay import Result

from .accelerators import MEMORY_SHARE, Accelerator
from .model_shape import ModelShape

if TYPE_CHECKING:
    from .setup import Setup


ROOM_BESIDE_WEIGHTS = 1.2
"""Memory that a model needs, as a multiple of its weights, if no workers are given."""

WORKERS = (1, 2, 4, 8, 16)
"""Numbers of accelerators that are tried."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The rates of an engine: of prefill, and of its links to host memory.

    Attributes
    ----------
    prefill_rate : float
        Tokens per second that are prefilled; 0 if not known.
    link_bandwidth : float
        Bytes per second to or from host memory, all links together; 0 if not known.
    accelerator : Accelerator or None
        The accelerator; None if both rates were given.
    workers : int
        Number of accelerators.
    device_memory : int
        Their memory for KV blocks beside the weights, bytes; 0 if not known.
    prefill_given, link_given : bool
        Whether the rate was given; otherwise it is estimated.
    workers_given : bool
        Whether the number of accelerators was given; otherwise the fewest that hold the model.
    """

    prefill_rate: float
    link_bandwidth: float
    accelerator: Accelerator | None = None
    workers: int = 1
    device_memory: int = 0
    _: KW_ONLY
    prefill_given: bool = False
    link_given: bool = False
    workers_given: bool = False

    @property
    def name(self) -> str:
        """Name in a sentence."""
        if self.accelerator is None:
            return "the engine described"
        return f"{self.workers} × {self.accelerator.name}"

    @property
    def is_known(self) -> bool:
        """Whether both rates are known."""
        return self.prefill_rate > 0 and self.link_bandwidth > 0


def workers_for(model: ModelShape, accelerator: Accelerator) -> int:
    """Return the fewest accelerators, a power of two, that hold a model; 0 if too many would.

    A model whose size is not known is assumed to fit on one.
    """
    needed = ROOM_BESIDE_WEIGHTS * model.weight_bytes
    memory = accelerator.memory * MEMORY_SHARE
    return next((count for count in WORKERS if count * memory >= needed), 0)


def engine_of(
    model: ModelShape | None,
    accelerator: Accelerator | None,
    *,
    workers: int | None = None,
    prefill_rate: float | None = None,
    link_bandwidth: float | None = None,
) -> Engine:
    """Return an engine with estimated rates; given rates replace the estimates."""
    count = workers or 1
    estimated_prefill = estimated_link = 0.0
    device_memory = 0
    if accelerator is not None:
        if model is not None and workers is None:
            count = workers_for(model, accelerator) or 1
        estimated_link = count * accelerator.link_bandwidth
        if model is not None and model.active_parameters:
            estimated_prefill = count * accelerator.prefill_rate(model.active_parameters)
            left = count * accelerator.memory * MEMORY_SHARE - model.weight_bytes
            device_memory = max(0, int(left))
    return Engine(
        prefill_rate=prefill_rate or estimated_prefill,
        link_bandwidth=link_bandwidth or estimated_link,
        accelerator=accelerator,
        workers=count,
        device_memory=device_memory,
        prefill_given=prefill_rate is not None,
        link_given=link_bandwidth is not None,
        workers_given=workers is not None,
    )


@dataclass(frozen=True, slots=True)
class Balance:
    """Savings and costs of a policy over the trace.

    Attributes
    ----------
    prefill_seconds : float
        Prefill that its hits save.
    load_seconds, store_seconds : float
        Time that hit blocks take from host memory, and stored blocks to it.
    """

    prefill_seconds: float
    load_seconds: float
    store_seconds: float

    @property
    def moving_seconds(self) -> float:
        """Time on the link, both directions added."""
        return self.load_seconds + self.store_seconds

    @property
    def net_seconds(self) -> float:
        """Savings less costs."""
        return self.prefill_seconds - self.moving_seconds

    @property
    def pays(self) -> bool:
        """Whether the savings exceed the costs."""
        return self.net_seconds > 0


def balance(setup: Setup, result: Result, engine: Engine) -> Balance:
    """Return the balance of a result; both rates of the engine must be known."""
    block_bytes = setup.block_bytes
    return Balance(
        prefill_seconds=result.offloaded_tokens / engine.prefill_rate,
        load_seconds=(result.loaded or 0) * block_bytes / engine.link_bandwidth,
        store_seconds=result.stored * block_bytes / engine.link_bandwidth,
    )
