"""Tool schemas of the OpenAI form, checked."""

import json
from collections.abc import Mapping, Sequence

from turnkv.conversation.messages import check_json
from turnkv.errors import InvalidMessagesError


def parse_tools(raw: object) -> tuple[dict[str, object], ...]:
    """Check a request's `tools`; None and an empty list hold none.

    Raises:
        InvalidMessagesError: an entry is no function schema, or JSON cannot carry it. `field` names the entry.
    """
    if raw is None:
        return ()
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes | bytearray):
        raise InvalidMessagesError("is not a list", remedy="send a list of function schemas", field="tools")
    names: set[str] = set()
    tools = []
    for place, tool in enumerate(raw):
        problem = _problem(tool, names)
        if problem is not None:
            raise InvalidMessagesError(
                problem,
                remedy="send {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}",
                field=f"tools[{place}]",
            )
        tools.append(dict(tool))
    return tuple(tools)


def _problem(tool: object, names: set[str]) -> str | None:
    """Say what is wrong with one schema; its name is added to `names`."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return "is not an object of type 'function'"
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        return "has no function.name"
    if function["name"] in names:
        return f"repeats the name {function['name']!r}"
    names.add(function["name"])
    for name, kind in (("description", str), ("parameters", Mapping)):
        if function.get(name) is not None and not isinstance(function[name], kind):
            return f"has a function.{name} of type {type(function[name]).__name__}"
    return _json_problem(tool)


def _json_problem(tool: object) -> str | None:
    try:
        check_json(tool)
        json.dumps(tool, allow_nan=False)
    except (ValueError, TypeError) as error:
        return str(error)
    return None
