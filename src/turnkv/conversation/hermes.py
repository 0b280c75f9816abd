"""The Hermes tool form: schemas in `<tools>`, calls in `<tool_call>`, results in `<tool_response>`.

Used for templates that know no tools, and to read the replies of those that write calls this way themselves.
Source: the form that the Hermes 2 Pro models introduced and Qwen2.5 and many others share.
"""

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence

from turnkv.conversation.messages import ToolCall, load_arguments

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)

_INSTRUCTIONS = """\
You can call the tools listed below, one JSON schema a line.
<tools>
{schemas}
</tools>
To call a tool, write its name and arguments as one JSON object between tags, one such block for each call:
<tool_call>
{{"name": "the tool's name", "arguments": {{"argument": "value"}}}}
</tool_call>
Results come back between <tool_response> and </tool_response>. Call a tool only where it helps."""


def json_text(value: object) -> str:
    """Return JSON on one line, letters of all scripts as they are."""
    return json.dumps(value, ensure_ascii=False)


def tools_text(tools: Iterable[object]) -> str:
    """Return the part of the system text that tells a model which tools there are and how to call them."""
    return _INSTRUCTIONS.format(schemas="\n".join(json_text(tool) for tool in tools))


def calls_text(content: str, calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
    """Return an assistant's content followed by its calls, given as (name, arguments)."""
    blocks = [
        f"<tool_call>\n{json_text({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    ]
    return "\n".join([content, *blocks] if content else blocks)


def results_text(results: Iterable[str]) -> str:
    """Return consecutive results as the content of one user message."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def parse_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split a reply into its content and its calls, which get fresh ids. A malformed block stays in the content."""
    calls: list[ToolCall] = []

    def take(block: re.Match[str]) -> str:
        call = _read(block[1], len(calls))
        if call is None:
            return block[0]
        calls.append(call)
        return ""

    content = _CALL.sub(take, text)
    return (content.strip() if calls else text), tuple(calls)


def parse_reasoning(text: str, *, is_open: bool) -> tuple[str, str | None]:
    """Split a reply into what follows its leading `<think>` block and the block's text, None where there is none.

    Args:
        text: the reply.
        is_open: the generation prompt itself ended in `<think>`, so the reply starts inside the block.
    """
    thought = _THOUGHT.match(f"<think>{text}" if is_open and not text.lstrip().startswith("<think>") else text)
    if thought is None:
        return text, None
    return thought.string[thought.end() :].lstrip("\n"), thought[1].strip() or None


def _read(text: str, ordinal: int) -> ToolCall | None:
    try:
        block = load_arguments(text)
        name, arguments = block.get("name"), block.get("arguments", {})
        if isinstance(arguments, str):
            arguments = load_arguments(arguments)
    except ValueError:
        return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or block.keys() - {"name", "arguments"}:
        return None
    call_id = f"call_{ordinal:02x}{uuid.uuid4().hex[:22]}"
    return ToolCall(call_id, name, json_text(arguments))
