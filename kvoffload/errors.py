"""The exceptions and their texts, for both twins."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection

__all__ = [
    "BackendError",
    "BlockNotFoundError",
    "BlockNotPinnedError",
    "BlockNotReadyError",
    "MissingExtraError",
    "OffloadError",
    "PolicyError",
    "RefCountOverflowError",
    "RequestFinishedError",
]

# Hashes are shown in hex up to this many bytes: a 32-byte digest is shown whole.
_SHOWN_HASH_BYTES = 32
_SHOWN_INT_BITS = 256
_SHOWN_CHARACTERS = 120


class OffloadError(Exception):
    """The root of the package's own exceptions; ``str()`` is the bare message."""

    def __str__(self) -> str:
        # KeyError would show the repr of its argument.
        return str(self.args[0]) if self.args else ""


class BlockNotFoundError(OffloadError, KeyError):
    """A requested block is not resident."""


class BlockNotReadyError(OffloadError, RuntimeError):
    """A block that is still being stored cannot be read."""


class BlockNotPinnedError(OffloadError, RuntimeError):
    """A load that was never prepared was completed."""


class RefCountOverflowError(OffloadError, OverflowError):
    """A block cannot be pinned once more: its ``ref_cnt`` is an int32."""


class RequestFinishedError(OffloadError, RuntimeError):
    """A method of a finished request was called."""


class BackendError(OffloadError, RuntimeError):
    """A user's ``Backend`` broke its contract."""


class PolicyError(OffloadError, RuntimeError):
    """A user's policy broke its contract, or a call would change a policy that a manager owns."""


class MissingExtraError(ImportError):
    """A feature needs an extra, or the extensions, that this installation lacks."""


def describe(value: object) -> str:
    """Return any value as a short text of one line."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_INT_BITS:
        return f"an integer of {value.bit_length()} bits"
    text = " ".join(map(str.strip, reprlib.repr(value).splitlines()))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def describe_hash(block_hash: bytes) -> str:
    """Return the hash in hex, cut after 32 bytes with its length."""
    if len(block_hash) <= _SHOWN_HASH_BYTES:
        return block_hash.hex()
    return f"{block_hash[:_SHOWN_HASH_BYTES].hex()}... ({len(block_hash)} bytes)"


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of an error's text: the known name that is nearest, if one is near."""
    near = difflib.get_close_matches(name.casefold(), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown_name(argument: str, name: str, known: Collection[str], other: str = "") -> ValueError:
    """Build the error of a name that is not known; `other` is what it may be besides."""
    rule = f"{argument} must be one of {', '.join(known)}{other}"
    return ValueError(f"{rule}, got {describe(name)}{did_you_mean(name, known)}")


def block_not_found(call: str, block_hash: bytes) -> BlockNotFoundError:
    """Build the error of `call` on a block that is not resident."""
    return BlockNotFoundError(f"{call}: block {describe_hash(block_hash)} is not resident")


def block_not_ready(call: str, block_hash: bytes) -> BlockNotReadyError:
    """Build the error of `call` on a pending block."""
    return BlockNotReadyError(
        f"{call}: block {describe_hash(block_hash)} is not ready, its store is pending"
    )


def block_not_pinned(call: str, block_hash: bytes) -> BlockNotPinnedError:
    """Build the error of `call` on a block without a pin to release."""
    return BlockNotPinnedError(f"{call}: block {describe_hash(block_hash)} is not pinned")


def ref_count_overflow(call: str, block_hash: bytes) -> RefCountOverflowError:
    """Build the error of `call` on a block that has all the pins that an int32 can count."""
    return RefCountOverflowError(
        f"{call}: block {describe_hash(block_hash)} is pinned 2**31 - 1 times and cannot be "
        "pinned again"
    )


def request_finished(call: str) -> RequestFinishedError:
    """Build the error of `call` on a request that has finished."""
    return RequestFinishedError(f"{call}: the request has finished")


def block_already_resident(call: str, block_hash: bytes) -> ValueError:
    """Build the error of `call`, an insert, on a block that is resident."""
    return ValueError(f"{call}: block_hash must not be resident, got {describe_hash(block_hash)}")


def not_initialised(what: str) -> RuntimeError:
    """Build the error of a call on an object, such as a manager, whose ``__init__`` has not run."""
    return RuntimeError(f"the {what} is not initialised: call super().__init__() first")


def manager_initialised() -> RuntimeError:
    """Build the error of a vLLM manager whose ``__init__`` runs again."""
    return RuntimeError("the manager is initialised already: build another one")


def manager_at_work() -> RuntimeError:
    """Build the error of a call on a vLLM manager during another call."""
    return RuntimeError(
        "the manager is in the middle of another call: hold a lock around each, and do not call it "
        "from a request's context"
    )


def backend_in_use(num_given: int) -> RuntimeError:
    """Build the error of reinitialising a backend while its slots are in use."""
    return RuntimeError(
        f"the backend cannot be initialised again: {num_given} of its slots are in use"
    )


def policy_owned(call: str) -> PolicyError:
    """Build the error of `call`, which would change a policy that belongs to a manager."""
    return PolicyError(
        f"{call}: the policy belongs to a manager, and only that manager may change it"
    )


def cannot_pickle(thing: object) -> TypeError:
    """Build the error of pickling or copying an object that owns slots or memory."""
    return TypeError(f"cannot pickle {type(thing).__name__!r} object")
