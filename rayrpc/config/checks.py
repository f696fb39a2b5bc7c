"""Check the fields of a dataclass of settings; errors name key, source, value and what is valid."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rayrpc.errors import ConfigError

__all__ = [
    "ADDRESS",
    "AMOUNTS",
    "COUNT",
    "Check",
    "FLAG",
    "GPUS",
    "PEER_SECONDS",
    "PORTS",
    "POSITIVE_SECONDS",
    "Place",
    "QUANTITY",
    "RUNTIME_ENV",
    "SECONDS",
    "TEXT",
    "check_fields",
    "checked",
    "choice",
    "fields_of",
    "key",
    "mapping",
]


@dataclass(frozen=True)
class Place:
    """The source and key of a value, for errors about it.

    Args:
        source (str): a file, the environment, a function's arguments.
        key (str): such as ``workers['ps'].num_cpus``.
        optional (bool): None is valid, too.
    """

    source: str
    key: str = ""
    optional: bool = False

    def inside(self, suffix: str, optional: bool = False) -> Place:
        """Return the place of a part of the value."""
        return Place(self.source, self.key + suffix, optional)

    def wrong(self, value: object, valid: str) -> ConfigError:
        """Return an error: the value here must be what ``valid`` says."""
        none = ", or none" if self.optional else ""
        shown = reprlib.repr(value)
        return ConfigError(f"{self.key} (from {self.source}) is {shown}; it must be {valid}{none}")

    def unknown(self, name: object, valid: Iterable[str]) -> ConfigError:
        """Return an error: there is no such key; it names the nearest of the valid ones."""
        spelling = {key.lower(): key for key in valid}
        nearest = difflib.get_close_matches(str(name).lower(), spelling, n=1, cutoff=0.0)[0]
        within = f"{self.key}: " if self.key else ""
        return ConfigError(
            f"{within}unknown key {str(name)!r} (from {self.source}); the nearest valid key is "
            f"{spelling[nearest]!r}. Valid keys: {', '.join(spelling.values())}"
        )


# Returns the value in its final form, or raises the place's ConfigError.
Check: TypeAlias = Callable[[Any, Place], Any]


def scalar(kind: type[Any], valid: str, fits: Callable[[Any], Any]) -> Check:
    """Return a check for one value.

    Args:
        kind: its type; float accepts int, too.
        valid: says in words what is valid.
        fits: returns something true for a valid value of that type.
    """
    accepted = (int, float) if kind is float else (kind,)

    def check(value: Any, place: Place) -> Any:
        # bool is a subclass of int; a number that is given as one is a mistake.
        right_type = isinstance(value, accepted) and isinstance(value, bool) is (kind is bool)
        if not right_type or not fits(value):
            raise place.wrong(value, valid)
        return kind(value)

    return check


def choice(*choices: str) -> Check:
    """Return a check for one of several texts, in any case."""
    spelling = {choice.lower(): choice for choice in choices}

    def check(value: Any, place: Place) -> str:
        if not isinstance(value, str) or value.lower() not in spelling:
            raise place.wrong(value, f"one of {', '.join(spelling.values())}")
        return spelling[value.lower()]

    return check


def mapping(valid: str, item: Check) -> Check:
    """Return a check for a mapping from names to values that ``item`` accepts."""

    def check(value: Any, place: Place) -> dict[str, Any]:
        # A YAML key whose entries are all commented out reads as None.
        value = {} if value is None else value
        if not isinstance(value, Mapping) or not all(isinstance(k, str) and k for k in value):
            raise place.wrong(value, f"a mapping from {valid}")
        return {k: item(v, place.inside(f"[{k!r}]")) for k, v in value.items()}

    return check


def _plain(value: Any, place: Place) -> Any:
    # Settings travel to every rank and back into YAML: no modules or other live objects.
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return [_plain(each, place.inside(f"[{i}]")) for i, each in enumerate(value)]
    if isinstance(value, Mapping):
        return {k: _plain(each, place.inside(f"[{k!r}]")) for k, each in value.items()}
    raise place.wrong(value, "plain data: text, numbers, true, false, none, lists, mappings")


def _amount(value: Any, place: Place) -> Any:
    if place.key.endswith(("['CPU']", "['GPU']", "['memory']", "['object_store_memory']")):
        raise place.wrong(value, "left out: num_cpus, num_gpus and memory stand for these")
    return QUANTITY(value, place)


def _texts(value: Any, place: Place) -> tuple[str, ...]:
    value = () if value is None else value  # as in ``mapping``
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise place.wrong(value, "a list of texts")
    return tuple(value)


def _ports(value: Any, place: Place) -> str:
    found = re.fullmatch(r"(\d{1,5})(?:\s*-\s*(\d{1,5}))?", str(value).strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < first <= last < 1 << 16:
        raise place.wrong(value, "FIRST-LAST, two ports of 1 to 65535")
    return f"{first}-{last}"


FLAG = scalar(bool, "true or false", lambda _: True)
TEXT = scalar(str, "text, not empty", str.strip)
COUNT = scalar(int, "a whole number, 1 or more", lambda n: n >= 1)
SECONDS = scalar(float, "seconds, 0 or more", lambda n: 0 <= n < math.inf)
PEER_SECONDS = scalar(float, "seconds, 2 or more", lambda n: 2 <= n < math.inf)
POSITIVE_SECONDS = scalar(float, "seconds, more than 0", lambda n: 0 < n < math.inf)
QUANTITY = scalar(float, "a number, 0 or more", lambda n: 0 <= n < math.inf)
GPUS = scalar(
    float,
    "a number, 0 or more, and whole above 1",
    lambda n: 0 <= n < math.inf and (n <= 1 or n % 1 == 0),
)
ADDRESS = scalar(
    str,
    'host:port, ray://host:port, "auto" or "local"',
    re.compile(r"auto|local|[\w.+-]+://\S+|\S+:\d+").fullmatch,
)
PORTS: Check = _ports
AMOUNTS = mapping("resource name to amount", _amount)
TEXTS: Check = _texts
RUNTIME_ENV = mapping("the names of Ray's runtime_env to plain data", _plain)


def key(default: Any, check: Check, doc: str, parse: Callable[[str], Any] = str.strip) -> Any:
    """Declare a field of a dataclass.

    Args:
        default: its value where none is given; None makes None valid.
        check: for values that are not None.
        doc: its meaning, a sentence.
        parse: reads it from environment text; may raise ValueError.
    """
    about = {"doc": doc, "check": check, "parse": parse}
    if default == {}:
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


def fields_of(owner: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a dataclass by name."""
    return {each.name: each for each in dataclasses.fields(owner)}


def checked(owner: type[Any], values: Mapping[Any, Any], place: Place) -> dict[str, Any]:
    """Return values of a dataclass's fields in their final form.

    Args:
        owner: the dataclass; its fields were declared by ``key``.
        values: by field.
        place: of the values together.

    Raises:
        ConfigError: a field is unknown or a value is not valid.
    """
    fields = fields_of(owner)
    result: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise place.unknown(name, fields)
        optional = fields[name].default is None
        text = value.strip().lower() if isinstance(value, str) else None
        if optional and (value is None or text in ("", "none")):
            result[name] = None
            continue
        within = place.inside(f".{name}" if place.key else name, optional)
        result[name] = fields[name].metadata["check"](value, within)
    return result


def check_fields(instance: Any) -> None:
    """Bring the fields of a new dataclass instance, frozen or not, into their final form.

    Raises:
        ConfigError: a value is not valid.
    """
    for name, value in checked(type(instance), vars(instance), Place("arguments")).items():
        object.__setattr__(instance, name, value)
