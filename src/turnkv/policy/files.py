"""Policy files: TOML with the sections of a policy; presets ship with the package."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any

from turnkv.errors import InvalidConfigError, InvalidFileError
from turnkv.policy.policy import Keep, Policy, Window
from turnkv.policy.precision import Old, Precision
from turnkv.types import SpanClass, Tier

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def preset_names() -> list[str]:
    """Names of the policies that ship with the package."""
    files = resources.files("turnkv.policy.presets").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_policy(name_or_path: str) -> Policy:
    """The preset of this name, or the policy that a TOML file holds.

    Raises:
        InvalidFileError: there is neither, or the file cannot be read or is no TOML.
        InvalidConfigError: a section, key or value is not understood.
    """
    if name_or_path in preset_names():
        text = resources.files("turnkv.policy.presets").joinpath(f"{name_or_path}.toml").read_text("utf-8")
        return parse_policy(name_or_path, text)
    path = Path(name_or_path)
    if not path.is_file():
        raise InvalidFileError(
            f"policy {name_or_path!r}: no preset and no file of this name; presets: {', '.join(preset_names())}"
        )
    try:
        return parse_policy(path.stem, path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidFileError(f"{path}: not TOML: {error}; see docs/policies.md for the form") from None
    except OSError as error:
        raise InvalidFileError(f"{path}: cannot be read: {error.strerror}; see to its permissions") from None


def parse_policy(name: str, text: str) -> Policy:
    """Read a policy from TOML text."""
    sections = tomllib.loads(text)
    _refuse_unknown("", sections, ("window", "keep", "precision"))
    window = _table(sections, "window")
    keep = _table(sections, "keep")
    precision = _table(sections, "precision")
    if window is not None and "budget" in window:
        window["budget_bytes"] = parse_size("window.budget", window.pop("budget"))
    for section, table, numbers in (("window", window, ("high", "low")), ("keep", keep, ("recent",))):
        for key in numbers:
            if table is not None and key in table and (type(table[key]) is not int):
                raise InvalidConfigError(f"{section}.{key}", table[key], "is no whole number", remedy="give one")
    if keep is not None and "pinned" in keep:
        keep["pinned"] = _strings("keep.pinned", keep["pinned"], "patterns")
    return Policy(
        name=name,
        window=None if window is None else Window(**window),
        keep=Keep() if keep is None else Keep(**keep),
        precision=None if precision is None else _precision(precision),
    )


def _precision(table: dict[str, Any]) -> Precision:
    """Read `[precision]`."""
    if "exact" in table:
        table["exact"] = _strings("precision.exact", table["exact"], "classes")
    if "rest" in table:
        table["rest"] = _tier("precision.rest", table["rest"])
    if "old" in table:
        old = table["old"]
        if not isinstance(old, dict) or set(old) != {"after", "store"} or type(old["after"]) is not int:
            raise InvalidConfigError(
                "precision.old", old, "is no rule", remedy='write it as { after = 4, store = "int4" }'
            )
        table["old"] = Old(after=old["after"], store=_tier("precision.old.store", old["store"]))
    layers = table.get("exact_layers", [])
    if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
        raise InvalidConfigError("precision.exact_layers", layers, "is no list of layers", remedy="give numbers in [ ]")
    table["exact_layers"] = tuple(layers)
    patterns = table.get("patterns", {})
    if not isinstance(patterns, dict):
        raise InvalidConfigError(
            "precision.patterns", patterns, "is no table", remedy='write it as { number = ["..."] }'
        )
    _refuse_unknown("precision.patterns.", patterns, tuple(SpanClass))
    table["patterns"] = {
        SpanClass(name): _strings(f"precision.patterns.{name}", given, "patterns") for name, given in patterns.items()
    }
    return Precision(**table)


def _tier(field: str, value: object) -> Tier:
    """A tier as one format for keys and values, or one for each."""
    if isinstance(value, str):
        return Tier(value, value)
    if isinstance(value, dict) and set(value) == {"k", "v"} and all(isinstance(form, str) for form in value.values()):
        return Tier(value["k"], value["v"])
    raise InvalidConfigError(field, value, "is no tier", remedy='give "int8", or { k = "int8", v = "int4" }')


def _strings(field: str, value: object, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidConfigError(field, value, "is no list of strings", remedy=f"give {what} in [ ]")
    return tuple(value)


def parse_size(field: str, value: object) -> int:
    """Bytes of a size such as `"2GiB"`, `"500MB"` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2] not in _UNITS or isinstance(value, bool):
        raise InvalidConfigError(field, value, "is no size", remedy='give a number of bytes or one such as "2GiB"')
    return int(Decimal(match[1]) * _UNITS[match[2]])


def _table(sections: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    table = sections.get(name)
    if table is None:
        return None
    if not isinstance(table, dict):
        raise InvalidConfigError(name, table, "is no section", remedy=f"write it as [{name}]")
    known = {
        "window": ("high", "low", "budget", "overflow", "ranks"),
        "keep": tuple(entry.name for entry in fields(Keep)),
        "precision": tuple(entry.name for entry in fields(Precision)),
    }[name]
    _refuse_unknown(f"{name}.", table, known)
    return dict(table)


def _refuse_unknown(prefix: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            raise InvalidConfigError(
                f"{prefix}{key}", table[key], "is no known setting", remedy=f"known here: {', '.join(known)}"
            )
