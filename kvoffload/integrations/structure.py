"""The structure of an engine's interface, described with rules and compared with a declaration.

An integration lists in a file the names of an engine that it uses, module -> name -> rule, and the
results of the rules in a tested release. The same rules describe the installed release: one with an
equal description works, and each difference is reported.

Rules
    parameters
        The parameters, for a class those of its constructor. ``...`` stands for a default that is
        not a plain value.
    fields
        All fields of a dataclass, in order; for dataclasses that are built here.
    abstract, methods
        All abstract methods; all public methods; for interfaces that are implemented here.
    sets
        All attributes that a constructor sets.
    has
        Attributes, fields and members that are read, among others.

    A name without a rule must exist and may be any object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import enum
import importlib
import inspect
import json
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Interface = Mapping[str, Mapping[str, Mapping[str, Sequence[str]]]]
"""Module -> name in it -> rule -> results of the rule."""


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or value == () or isinstance(value, bool | int | float | str):
        return repr(value)
    return "..."


def _parameters(thing: Any) -> list[str]:
    texts: list[str] = []
    for one in inspect.signature(thing).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not any(text.startswith("*") for text in texts):
            texts.append("*")
        default = "" if one.default is one.empty else f"={_default(one.default)}"
        stars = "*" * (one.kind is one.VAR_POSITIONAL) + "**" * (one.kind is one.VAR_KEYWORD)
        texts.append(f"{stars}{one.name}{default}")
    return texts


def _fields(thing: Any) -> list[str]:
    texts = []
    for field in dataclasses.fields(thing):
        default = ""
        if field.default is not dataclasses.MISSING:
            default = f"={_default(field.default)}"
        elif field.default_factory is not dataclasses.MISSING:
            default = f"={getattr(field.default_factory, '__name__', '...')}()"
        texts.append(f"{field.name}{default}")
    return texts


def _set_by_constructor(thing: Any) -> list[str]:
    found: set[str] = set()
    for base in inspect.getmro(thing):
        constructor = base.__dict__.get("__init__")
        if inspect.isfunction(constructor):
            steps = dis.get_instructions(constructor)
            found.update(step.argval for step in steps if step.opname == "STORE_ATTR")
    return sorted(found)


def _has(thing: Any, name: str) -> bool:
    if hasattr(thing, name):
        return True
    if not inspect.isclass(thing):
        return False
    if dataclasses.is_dataclass(thing) and name in {one.name for one in dataclasses.fields(thing)}:
        return True
    return name in _set_by_constructor(thing)


def _methods(thing: Any) -> list[str]:
    return sorted(
        name for name in dir(thing) if not name.startswith("_") and callable(getattr(thing, name))
    )


RULES: Mapping[str, Callable[[Any], list[str]]] = {
    "abstract": lambda thing: sorted(thing.__abstractmethods__),
    "fields": _fields,
    "methods": _methods,
    "parameters": _parameters,
    "sets": _set_by_constructor,
}


def describe(interface: Interface) -> dict[str, dict[str, dict[str, list[str]]] | Exception]:
    """Describe the installed modules with the rules of an interface.

    Missing names and rules that cannot be applied are omitted. For a module that cannot be
    imported, the exception is returned.
    """
    found: dict[str, dict[str, dict[str, list[str]]] | Exception] = {}
    for module_name, names in interface.items():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # noqa: BLE001 (a module may raise anything at import)
            found[module_name] = error
            continue
        found[module_name] = described = {}
        for name, rules in names.items():
            with contextlib.suppress(AttributeError):
                thing = operator.attrgetter(name)(module)
                described[name] = _describe(thing, rules)
    return found


def _describe(thing: Any, rules: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    found = {}
    for rule, names in rules.items():
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            found[rule] = (
                [name for name in names if _has(thing, name)]
                if rule == "has"
                else RULES[rule](thing)
            )
    return found


def differences(declared: Interface, installed: Mapping[str, Any]) -> list[str]:
    """Return the differences between an interface and a result of `describe`, one line each."""
    lines = []
    for module, names in declared.items():
        described = installed[module]
        if isinstance(described, Exception):
            lines.append(f"{module} cannot be imported ({described})")
            continue
        for name, rules in names.items():
            if name not in described:
                lines.append(f"{module} has no {name}")
                continue
            for rule, expected in rules.items():
                found = described[name].get(rule, [])
                if found == expected:
                    continue
                missing = [one for one in expected if one not in found]
                extra = [one for one in found if one not in expected]
                if not missing + extra:  # in another order
                    missing, extra = list(expected), found
                texts = [f"expected {', '.join(missing)}"] if missing else []
                texts.append(f"found {', '.join(extra) or 'none'}")
                lines.append(f"{module}.{name}: {rule}: {'; '.join(texts)}")
    return lines


def _check_rules(interface: Interface) -> None:
    """Raise ValueError unless an interface has rules with lists, and nothing else."""
    for names in interface.values():
        for thing, rules in names.items():
            for rule, found in rules.items():
                if rule not in (*RULES, "has") or not isinstance(found, list):
                    raise ValueError(f"{thing}: {rule!r} must be a rule with a list")


def read_parts(path: Path, names: Sequence[str], reader: str = "") -> list[Any]:
    """Return the parts of a file of interfaces: it has these and no others, none of them empty.

    The part ``release`` is text, another one an interface. Raise ImportError if the file cannot be
    read or is malformed; the message begins with `reader` and names the file and the cause.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if set(held) != set(names) or not all(held.values()):
            raise ValueError(f"it must have {' and '.join(names)}")
        for name in names:
            if name != "release":
                _check_rules(held[name])
            elif not isinstance(held[name], str):
                raise ValueError("its release must be text")
    except (OSError, ValueError, TypeError, AttributeError) as cause:
        raise ImportError(
            f"{reader}cannot read {path} ({cause}); install kvoffload anew"
        ) from cause
    return [held[name] for name in names]


def read_interface(path: Path) -> tuple[str, Interface]:
    """Read the tested release and its interface; raise ImportError as `read_parts` does."""
    release, interface = read_parts(path, ("release", "interface"))
    return release, interface


def check_declared(heading: str, release: str, declared: Interface, footer: str) -> None:
    """Raise ImportError, with each difference, unless the installed modules are as declared."""
    found = differences(declared, describe(declared))
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        raise ImportError(f"{heading} is not that of {release}:{lines}\n{footer}")


def check_interface(package: str, project: str, version: str, path: Path) -> None:
    """Compare the installed release with the tested interface.

    Another release with the same interface works; a log line says that it was not tested.

    Parameters
    ----------
    package : str
        The integration, for messages.
    project, version : str
        The installed engine and its version.
    path : Path
        The file of the interface.

    Raises
    ------
    ImportError
        If the interfaces differ; the message names each difference.
    """
    release, interface = read_interface(path)
    heading = f"{package} found {project} {version}, whose interface"
    check_declared(heading, release, interface, f"supported version: {release}")
    if version != release:
        logging.getLogger(f"kvoffload.{project.lower()}").warning(
            "kvoffload: %s %s is not the release that was tested; its interface is that of %s",
            project,
            version,
            release,
        )
