"""A tokenizer of Hugging Face's library `tokenizers`, read from files, and its chat template."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload._extras import require
from kvoffload._printable import printable

from .errors import BadLineError, TraceError

if TYPE_CHECKING:
    from .chat_template import ChatTemplate

MOST_TOKENIZER_BYTES = 2**28
MOST_CONFIG_BYTES = 2**24
MOST_TEMPLATE_BYTES = 2**20
_SHOWN = 120  # characters of an error of the library


class Tokenizer:
    """A tokenizer, and the chat template beside it.

    Parameters
    ----------
    path : str or os.PathLike
        A ``tokenizer.json``, or a folder that holds one. The folder's ``chat_template.jinja``, or
        else `chat_template` in ``tokenizer_config.json``, is the template.

    Raises
    ------
    TraceError
        If a file cannot be read, is too large or has the wrong content.
    MissingExtraError
        Without the ``tokenizer`` extra.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require("jinja2", "--tokenizer", "tokenizer")
        tokenizers = require("tokenizers", "--tokenizer", "tokenizer")
        given = Path(path)
        is_folder = given.is_dir()
        file = given / "tokenizer.json" if is_folder else given
        data = _content(file, MOST_TOKENIZER_BYTES)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
            why = printable(str(error))[:_SHOWN]
            rule = f"must be a tokenizer.json of Hugging Face: {why}"
            raise TraceError(str(file), None, rule) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.template: ChatTemplate | None = _template_of(given) if is_folder else None

    def tokens(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of a text; BadLineError, without the text, if it fails."""
        try:
            encoded: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
            kind = type(error).__name__
            raise BadLineError(f"the tokenizer must accept the prompt, got {kind}") from None
        return encoded


def _template_of(folder: Path) -> ChatTemplate | None:
    """Return the chat template of a folder, or None."""
    from .chat_template import ChatTemplate

    config: dict[str, Any] = {}
    config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    if config_file.exists():
        try:
            config = json.loads(_content(config_file, MOST_CONFIG_BYTES))
        except (ValueError, RecursionError):
            config = []  # type: ignore[assignment]
        if not isinstance(config, dict):
            raise TraceError(str(config_file), None, "must be a JSON object, got something else")
    source: object = config.get("chat_template")
    origin = config_file
    if template_file.exists():
        origin = template_file
        source = _content(template_file, MOST_TEMPLATE_BYTES).decode("utf-8", "replace")
    named: dict[str, str] = {}
    if isinstance(source, str):
        named["default"] = source
    elif isinstance(source, list):
        for each in source:
            if isinstance(each, dict) and isinstance(each.get("template"), str):
                named[str(each.get("name"))] = each["template"]
    if "default" not in named:
        return None
    for text in named.values():
        if len(text.encode("utf-8", "replace")) > MOST_TEMPLATE_BYTES:
            rule = f"a chat template must be at most {MOST_TEMPLATE_BYTES} bytes long"
            raise TraceError(str(origin), None, f"{rule}, got a longer one")
    special = {name: _special(value) for name, value in config.items() if name.endswith("_token")}
    variables = {name: text for name, text in special.items() if text is not None}
    return ChatTemplate(str(origin), named["default"], named.get("tool_use"), variables)


def _special(value: object) -> str | None:
    """Return the text of a special token, which may be an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _content(file: Path, most: int) -> bytes:
    """Return the content of a file; TraceError if it cannot be read or is longer than `most`."""
    try:
        with file.open("rb") as stream:
            data = stream.read(most + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise TraceError(str(file), None, f"must be a readable file: {why}") from None
    if len(data) > most:
        raise TraceError(str(file), None, f"must be at most {most} bytes long, got more")
    return data
