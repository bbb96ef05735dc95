"""The one canonical encoding: msgpack with sorted text keys, no floats in keys, bounded decoding.

`decode(encode(v)) == v`, and `decode` refuses any bytes that `encode` would not have written, so equal
values have equal bytes and equal digests. Format: https://github.com/msgpack/msgpack/blob/master/spec.md,
restricted to nil, bool, int, str, bin, array and map with str keys (and float64 where allowed).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import msgpack

from gemmcache.errors import IntegrityError, UsageError

Value: TypeAlias = Any  # None | bool | int | float | str | bytes | list[Value] | dict[str, Value]

MAX_DEPTH = 16
MAX_BYTES = 64 << 20
#: Items of one list. The decoder allocates a list by its declared length, before it has seen an item.
MAX_ITEMS = 1 << 16
#: Lists, maps and items of all of them together: an empty map is one byte of input and 64 of memory.
MAX_TOTAL = 1 << 22
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


def _canonical(value: object, floats: bool, depth: int) -> Value:
    """A copy of `value` in canonical form: tuples as lists, maps with keys in code point order."""
    if depth > MAX_DEPTH:
        raise UsageError(f"value is nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, (bool, str, bytes)):
        return value
    if isinstance(value, int):
        if not _INT_MIN <= value <= _INT_MAX:
            # Not the number itself: Python refuses to print very long ones.
            raise UsageError(f"an integer of {value.bit_length()} bits does not fit in 64")
        return value
    if isinstance(value, float):
        if not floats:
            raise UsageError(f"a key can't hold the float {value!r}", remedy="use an integer or a string")
        if not math.isfinite(value):
            raise UsageError(f"{value!r} can't be stored")
        return value
    if isinstance(value, (list, tuple)):
        if len(value) > MAX_ITEMS:
            raise UsageError(f"a list of {len(value)} items is longer than the {MAX_ITEMS} allowed")
        return [_canonical(v, floats, depth + 1) for v in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"map key {key!r} is not a string")
        return {k: _canonical(value[k], floats, depth + 1) for k in sorted(value)}
    raise UsageError(f"a {type(value).__name__} can't be encoded")


#: Types of values that can be wrong in themselves; most maps of a manifest hold none.
_LOOKED_INTO = frozenset((dict, list, float))


def _flaw(root: list[Value] | dict[str, Value], floats: bool) -> str | None:
    """Why a container that was decoded is not canonical, None if encoding it again will tell the rest.

    `_canonical` says the same, but copies and sorts everything, which dominates the loading of a bundle.
    """
    level: list[Value] = [root]
    in_order: set[tuple[str, ...]] = set()  # the maps of a list have the same keys, nearly always
    for depth in range(MAX_DEPTH + 1):
        below: list[Value] = []
        for container in level:
            # Like _canonical, which counts what is in a container as a level of its own.
            if depth == MAX_DEPTH and container:
                return f"value is nested deeper than {MAX_DEPTH} levels"
            items: Iterable[Value] = container
            if type(container) is dict:
                keys = tuple(container)
                if keys not in in_order:
                    if set(map(type, keys)) - {str}:
                        return "a map key is not a string"
                    if list(keys) != sorted(keys):
                        return "map keys are not in canonical form: they are unsorted"
                    in_order.add(keys)
                items = container.values()
            if _LOOKED_INTO.isdisjoint(map(type, items)):
                continue
            for item in items:
                kind = type(item)
                if kind is dict or kind is list:
                    below.append(item)
                elif kind is float and not (floats and math.isfinite(item)):
                    return f"the float {item!r} can't be stored here"
        level = below
    return None


def encode(value: object, *, floats: bool = False) -> bytes:
    """Canonical bytes of `value`.

    Raises `UsageError` for types, floats (unless `floats`), non-finite numbers, list lengths or nesting
    that the format does not allow.
    """
    try:
        data: bytes = msgpack.packb(_canonical(value, floats, 0), use_bin_type=True)
    except UnicodeEncodeError as error:
        raise UsageError(f"text can't be encoded as UTF-8: {error}") from error
    return data


def decode(
    data: bytes,
    *,
    floats: bool = False,
    max_bytes: int = MAX_BYTES,
    max_total: int = MAX_TOTAL,
    what: str = "data",
) -> Value:
    """The value that canonical `data` encodes. `what` names the data in error messages.

    Raises `IntegrityError` if `data` is longer than `max_bytes`, has more than `max_total` lists, maps and
    items in them, is truncated, not msgpack, nested deeper than `MAX_DEPTH`, or not exactly what `encode`
    writes (duplicate or unsorted keys, longer number forms, extension types, trailing bytes, floats where
    not allowed).
    """
    if len(data) > max_bytes:
        raise IntegrityError(f"{what} has {len(data)} bytes, more than the {max_bytes} allowed")
    total = 0

    def count(container: Value) -> Value:
        # While decoding, not after: by then the memory would be taken.
        nonlocal total
        total += 1 + len(container)
        if total > max_total:
            raise ValueError(f"more than {max_total} items")
        return container

    try:
        # An item takes a byte at least, so that most data can't hold too many.
        hooks = {"object_hook": count, "list_hook": count} if len(data) > max_total else {}
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            use_list=True,
            **hooks,
            max_array_len=min(len(data), MAX_ITEMS),
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises ValueError, TypeError, its own and more
        raise IntegrityError(f"{what} is not valid msgpack: {type(error).__name__}: {error}") from error
    # A scalar alone is looked at in a list of its own.
    flaw = _flaw(value if isinstance(value, (dict, list)) else [value], floats)
    if flaw is not None:
        raise IntegrityError(f"{what} is not canonical: {flaw}")
    if msgpack.packb(value, use_bin_type=True) != data:
        raise IntegrityError(f"{what} is not in canonical form (duplicate or unsorted keys, or longer forms)")
    return value


def digest(kind: str, value: object) -> str:
    """sha256, as 64 hex digits, of the canonical encoding of `[kind, value]`.

    `kind` separates the domains, so that two things of different kinds never share a digest.
    """
    return hashlib.sha256(encode([kind, value])).hexdigest()


def bytes_digest(data: bytes | memoryview) -> str:
    """sha256 of raw bytes as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def is_digest(text: object) -> bool:
    """Whether `text` is a sha256 digest as this package writes them."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


_DIGEST = re.compile(r"[0-9a-f]{64}")


def finite(value: object) -> float | None:
    """`value` as a float; None unless it is an integer or a float (not a flag) and finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


class Fields:
    """Typed access to the fields of a decoded map; every complaint names the field and where it is.

    `kind` is the error class to raise: `IntegrityError` for stored bytes, `UsageError` for files that
    people write.
    """

    def __init__(
        self, value: object, where: str, *, kind: type[IntegrityError] | type[UsageError] = IntegrityError
    ) -> None:
        self.where = where
        self.kind = kind
        if type(value) is not dict and not isinstance(value, Mapping):
            raise kind(f"{where}: expected a map, found {type(value).__name__}")
        if set(map(type, value)) - {str}:
            key = next(k for k in value if type(k) is not str)
            raise kind(f"{where}: key {key!r} is not text")
        self._value: Mapping[str, object] = value
        self._seen: set[str] = set()

    def fail(self, name: str, problem: str) -> IntegrityError | UsageError:
        return self.kind(f"{self.where}: field '{name}' {problem}")

    def raw(self, name: str, *default: object) -> Any:
        self._seen.add(name)
        if name in self._value:
            return self._value[name]
        if default:
            return default[0]
        raise self.fail(name, "is missing")

    def _typed(self, name: str, kinds: tuple[type, ...], what: str, default: tuple[object, ...]) -> Any:
        value = self.raw(name, *default)
        if default and value is default[0]:
            return value
        # bool is an int to isinstance; a flag where a number belongs is an error in the file.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.fail(name, f"must be {what}, not {type(value).__name__}")
        return value

    def text(self, name: str, *default: str) -> str:
        value: str = self._typed(name, (str,), "text", default)
        return value

    def opt_text(self, name: str) -> str | None:
        value = self.raw(name, None)
        if value is not None and not isinstance(value, str):
            raise self.fail(name, f"must be text, not {type(value).__name__}")
        return value

    def integer(self, name: str, *default: int, low: int = 0, high: int = _INT_MAX) -> int:
        value: int = self._typed(name, (int,), "an integer", default)
        if not low <= value <= high:
            raise self.fail(name, f"is {value}, outside {low}..{high}")
        return value

    def number(self, name: str, *default: float) -> float:
        """A finite number; JSON files can hold NaN, infinities and integers beyond every float."""
        value = finite(self._typed(name, (int, float), "a number", default))
        if value is None:
            raise self.fail(name, "is not a finite number")
        return value

    def opt_number(self, name: str) -> float | None:
        return None if self.raw(name, None) is None else self.number(name)

    def flag(self, name: str, *default: bool) -> bool:
        return bool(self._typed(name, (bool,), "true or false", default))

    def digest(self, name: str) -> str:
        value = self.raw(name)
        if not is_digest(value):
            raise self.fail(name, "is not a sha256 digest of 64 lower-case hex digits")
        return str(value)

    def opt_digest(self, name: str) -> str | None:
        return None if self._value.get(name) is None else self.digest(name)

    def choice(self, name: str, allowed: Iterable[str], *default: str) -> str:
        value = self.text(name, *default)
        options = tuple(allowed)
        if value not in options:
            raise self.fail(name, f"is '{value}', not one of {', '.join(options)}")
        return value

    def items(self, name: str, *default: list[Any], most: int = 1 << 20) -> list[Any]:
        value = self._typed(name, (list, tuple), "a list", default)
        if len(value) > most:
            raise self.fail(name, f"has {len(value)} items, more than the {most} allowed")
        return list(value)

    def sub(self, name: str) -> Fields:
        return Fields(self.raw(name), f"{self.where}.{name}", kind=self.kind)

    def subs(self, name: str, *, most: int = 1 << 20) -> list[Fields]:
        return [
            Fields(v, f"{self.where}.{name}[{i}]", kind=self.kind) for i, v in enumerate(self.items(name, most=most))
        ]

    def item(self, name: str, i: int) -> Fields:
        """Item `i` of the list `name`, as a map."""
        return Fields(self._value[name][i], f"{self.where}.{name}[{i}]", kind=self.kind)  # type: ignore[index]

    def everything(self) -> Mapping[str, Any]:
        """The whole map, for a reader to whom every name is welcome."""
        return self._value

    def extra(self) -> dict[str, Any]:
        """Fields that nothing asked for: newer minor versions may add some; they are kept."""
        return {k: v for k, v in self._value.items() if k not in self._seen}

    def done(self) -> None:
        """Refuses fields that nothing asked for, where a key must be complete."""
        for name in self.extra():
            raise self.fail(name, "is not known here")
