"""The arguments of tiers, checked: block ids, regions and seconds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.errors import describe
from kvoffload.tiers.base import BlockIDs
from kvoffload.tiers.region import Region

__all__ = [
    "LONGEST_DEADLINE_S",
    "block_ids",
    "check_deadline",
    "check_region",
    "check_timeout",
    "first_repeat",
]

LONGEST_DEADLINE_S = 86_400.0


def block_ids(ids: BlockIDs) -> npt.NDArray[np.int64]:
    """Return block ids as ``(n,)`` int64.

    Raises
    ------
    TypeError, ValueError
        If they are not integers in one dimension.
    """
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"ids must have one dimension, got {array.ndim}")
    if len(array) and array.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {array.dtype}")
    if array.dtype == np.uint64 and len(array) and int(array.max()) >= 2**63:
        raise ValueError(f"ids must be < 2**63, got {array.max()}")
    return array.astype(np.int64)


def first_repeat(numbers: npt.NDArray[np.int64]) -> int | None:
    """Return the least number that occurs twice, None if there is none.

    Not by `numpy.unique`: since numpy 2.3 it waits for the interpreter's lock in a C++ destructor,
    which aborts the process where a daemon thread is in it when the interpreter ends.
    """
    ordered = np.sort(numbers)
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(repeats[0]) if len(repeats) else None


def check_region(name: str, region: Any, block_bytes: int) -> None:
    """Check that `region` is a region with blocks of a size.

    Raises
    ------
    TypeError, ValueError
        If it is not.
    """
    if not isinstance(region, Region):
        raise TypeError(f"{name} must be a Region, got {describe(region)}")
    if region.block_bytes != block_bytes:
        raise ValueError(
            f"{name} must have blocks of {block_bytes} bytes, got {region.block_bytes}"
        )


def check_deadline(deadline_s: float | None) -> float | None:
    """Return a deadline in seconds, None for none given.

    Raises
    ------
    TypeError, ValueError
        If it is not a number > 0.
    """
    return None if deadline_s is None else _seconds("deadline_s", deadline_s, at_least_zero=False)


def check_timeout(timeout_s: float) -> float:
    """Return the seconds that a call may wait, a day at most.

    Raises
    ------
    TypeError, ValueError
        If it is not a number >= 0.
    """
    return _seconds("timeout_s", timeout_s, at_least_zero=True)


def _seconds(name: str, value: Any, *, at_least_zero: bool) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise TypeError(f"{name} must be a number of seconds, got {describe(value)}")
    bound = ">= 0" if at_least_zero else "> 0"
    if math.isnan(value) or value < 0 or (value == 0 and not at_least_zero):
        raise ValueError(f"{name} must be {bound}, got {describe(value)}")
    return min(float(value), LONGEST_DEADLINE_S)
