"""Fields of a model's configuration, each held to a bound before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from kvoffload.errors import describe

MOST = 2**20  # of anything that is counted
MOST_LAYERS = 4096

HIDDEN = ("hidden_size", "n_embd", "d_model")


class Fields:
    """The fields of a configuration, from `path`, which is printable, of a kind of model."""

    def __init__(self, path: str, model_type: str, config: Mapping[str, Any]) -> None:
        self.path = path
        self.model_type = model_type
        self.config = config

    def refuse(self, reason: str) -> NoReturn:
        """Raise the error for a model that is not counted."""
        raise ValueError(
            f"model {describe(self.model_type)} is not counted: {reason}; measure the bytes per "
            "token and give them with --kv-bytes-per-token or --block-bytes"
        )

    def given(self, *names: str) -> str | None:
        """Return the first of these fields that is set."""
        return next((n for n in names if self.config.get(n) not in (None, 0, False, [])), None)

    def is_true(self, name: str) -> bool:
        """Return whether a field is true."""
        return self.config.get(name) is True

    def integer(self, *names: str, most: int = MOST) -> int:
        """Return the first of these fields that is set, a number 1 ... `most`."""
        name = self.given(*names)
        if name is None:
            raise ValueError(f"{self.path}: must have the field {names[0]}, got none")
        value = self.config[name]
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{self.path}: {name} must be 1 ... {most}, got {describe(value)}")
        return value

    def optional(self, *names: str, default: int) -> int:
        """Return a number 1 ... `MOST`, or `default` if none of these fields is set."""
        return self.integer(*names) if self.given(*names) else default

    def integers(self, name: str, least: int = 0) -> list[int]:
        """Return a list of at least `least` numbers 0 ... `MOST_LAYERS`."""
        value = self.config.get(name)
        if (
            not isinstance(value, list)
            or len(value) < least
            or not all(type(one) is int and 0 <= one <= MOST_LAYERS for one in value)
        ):
            count = f"at least {least}" if least else "a list of"
            raise ValueError(
                f"{self.path}: {name} must be {count} numbers 0 ... {MOST_LAYERS}, got "
                f"{describe(value)}"
            )
        return value

    def part(self, name: str) -> Fields | None:
        """Return the fields of a JSON object in a field; None if it has no object."""
        value = self.config.get(name)
        return Fields(self.path, self.model_type, value) if isinstance(value, dict) else None
