"""Reading the fields of parsed JSON, each checked and named in full when it is wrong."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

from turnkv.errors import InvalidFileError

T = TypeVar("T")


class Fields:
    """The fields of one JSON object. Every query raises InvalidFileError, naming the field, where it is wrong."""

    def __init__(self, value: object, where: str, known: frozenset[str] | None = None) -> None:
        """Take the object at the path `where`; refuse keys that are not `known` (None knows all).

        A path that ends in a blank (`results.json: `) stands for the whole file.
        """
        self._where = where
        if not isinstance(value, dict):
            raise InvalidFileError(f"{where.rstrip(': ') or 'results'}: must be an object, is {_shown(value)}")
        self._fields: dict[str, object] = value
        if known is not None and (unknown := sorted(value.keys() - known)):
            raise self.error(unknown[0], f"is no known field; known are {', '.join(sorted(known))}")

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def path(self, key: str) -> str:
        """Where the field `key` is, for messages."""
        return f"{self._where}{key}" if self._where == "" or self._where.endswith(" ") else f"{self._where}.{key}"

    def error(self, key: str, problem: str) -> InvalidFileError:
        """An error at the field `key`, to be raised."""
        return InvalidFileError(f"{self.path(key)}: {problem}")

    def required(self, key: str) -> object:
        """The field as it is."""
        if key not in self._fields:
            raise self.error(key, "is missing")
        return self._fields[key]

    def optional(self, key: str, read: Callable[[str], T], *, must_exist: bool = False) -> T | None:
        """The field as `read` gives it, or None if it is null, or absent and need not exist."""
        if must_exist:
            self.required(key)
        return None if self._fields.get(key) is None else read(key)

    def text(self, key: str) -> str:
        """A string."""
        value = self.required(key)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, is {_shown(value)}")
        return value

    def choice(self, key: str, choices: Sequence[str]) -> str:
        """One of `choices`."""
        value = self.text(key)
        if value not in choices:
            raise self.error(key, f"must be one of {', '.join(choices)}, is {_shown(value)}")
        return value

    def count(self, key: str) -> int:
        """A whole number from 0."""
        value = self.required(key)
        if not _is_count(value):
            raise self.error(key, f"must be a whole number from 0, is {_shown(value)}")
        assert isinstance(value, int)
        return value

    def counts(self, key: str) -> list[int]:
        """A list of whole numbers from 0."""
        value = self.required(key)
        if not isinstance(value, list) or not all(_is_count(item) for item in value):
            raise self.error(key, f"must be a list of whole numbers from 0, is {_shown(value)}")
        return value

    def number(self, key: str) -> float:
        """A finite number from 0."""
        value = self.required(key)
        # The upper bound refuses infinity, and whole numbers that no float can hold.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and 0 <= (number := cast("float", value)) <= sys.float_info.max:
            return float(number)
        raise self.error(key, f"must be a finite number from 0, is {_shown(value)}")

    def mapping(self, key: str) -> Mapping[str, object]:
        """An object whose keys are free."""
        value = self.required(key)
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, is {_shown(value)}")
        return value

    def items(self, key: str) -> Iterator[tuple[str, object]]:
        """The items of a list, each with its path."""
        value = self.required(key)
        if not isinstance(value, list):
            raise self.error(key, f"must be a list, is {_shown(value)}")
        for i, item in enumerate(value):
            yield f"{self.path(key)}[{i}]", item


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _shown(value: object) -> str:
    """The value, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
