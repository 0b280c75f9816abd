import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkv.conversation.messages import Message, ToolCall, parse_messages
from turnkv.conversation.tools import parse_tools
from turnkv.errors import InvalidMessagesError
from turnkv.types import Role


def call(call_id: str = "a", arguments: object = "{}", name: object = "look") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*items: object) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(items)}


def result(call_id: object = "a", content: object = "done") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


USER = {"role": "user", "content": "Hello"}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


MALFORMED: dict[str, tuple[object, int | None, str | None]] = {
    "not a list": ({"role": "user"}, None, None),
    "text in place of a list": ("Hello", None, None),
    "empty": ([], None, None),
    "message is no object": ([USER, "Hello"], 1, None),
    "role is missing": ([{"content": "Hello"}], 0, "role"),
    "role is unknown": ([{"role": "robot", "content": ""}], 0, "role"),
    "role is no string": ([{"role": nested(5000), "content": ""}], 0, "role"),
    "role is function": ([{"role": "function", "content": ""}], 0, "role"),
    "content is missing": ([{"role": "user"}], 0, "content"),
    "content is null without calls": ([{"role": "assistant", "content": None}], 0, "content"),
    "legacy function call": ([{"role": "assistant", "content": None, "function_call": {}}], 0, "function_call"),
    "content is a number": ([{"role": "user", "content": 3}], 0, "content"),
    "content is an object": ([{"role": "user", "content": {}}], 0, "content"),
    "part is text": ([{"role": "user", "content": ["Hello"]}], 0, "content[0]"),
    "part is an image": ([{"role": "user", "content": [{"type": "image_url"}]}], 0, "content[0]"),
    "part without text": ([{"role": "user", "content": [{"type": "text"}]}], 0, "content[0].text"),
    "surrogate in content": ([{"role": "user", "content": "\ud800"}], 0, "content"),
    "surrogate in a part": ([{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}], 0, "content[0].text"),
    "surrogate in a name": ([{"role": "user", "content": "", "name": "\ud800"}], 0, "name"),
    "calls on a user message": ([{**USER, "tool_calls": [call()]}], 0, "tool_calls"),
    "calls are an object": ([{"role": "assistant", "tool_calls": {"a": 1}}], 0, "tool_calls"),
    "call is text": ([calls("look")], 0, "tool_calls[0]"),
    "call without type": ([calls({"id": "a", "function": {}})], 0, "tool_calls[0].type"),
    "call without function": ([calls({"id": "a", "type": "function"})], 0, "tool_calls[0].function"),
    "call without name": ([calls(call(name=""))], 0, "tool_calls[0].function.name"),
    "call without id": ([calls(call(""))], 0, "tool_calls[0].id"),
    "surrogate in a call's name": ([calls(call(name="\ud800"))], 0, "tool_calls[0].function.name"),
    "arguments are missing": ([calls(call(arguments=None))], 0, "tool_calls[0].function.arguments"),
    "arguments are no JSON": ([calls(call(arguments="{"))], 0, "tool_calls[0].function.arguments"),
    "arguments are a list": ([calls(call(arguments="[]"))], 0, "tool_calls[0].function.arguments"),
    "arguments hold NaN": ([calls(call(arguments='{"x": NaN}'))], 0, "tool_calls[0].function.arguments"),
    "arguments overflow": ([calls(call(arguments='{"x": 1e999}'))], 0, "tool_calls[0].function.arguments"),
    "argument object holds NaN": ([calls(call(arguments={"x": float("nan")}))], 0, "tool_calls[0].function.arguments"),
    "arguments too deep": (
        [calls(call(arguments='{"x": ' + "[" * 99999 + "]" * 99999 + "}"))],
        0,
        "tool_calls[0].function.arguments",
    ),
    "arguments just too deep": ([calls(call(arguments={"x": nested(100)}))], 0, "tool_calls[0].function.arguments"),
    "argument object too deep": ([calls(call(arguments={"x": nested(9999)}))], 0, "tool_calls[0].function.arguments"),
    "escaped surrogate in arguments": (
        [calls(call(arguments='{"x": "\\ud800"}'))],
        0,
        "tool_calls[0].function.arguments",
    ),
    "surrogate key in arguments": ([calls(call(arguments='{"\\ud800": 1}'))], 0, "tool_calls[0].function.arguments"),
    "ids used twice": ([calls(call("a"), call("a"))], 0, "tool_calls[1].id"),
    "result without id": ([USER, calls(call()), result(None)], 2, "tool_call_id"),
    "result without a call": ([USER, result()], 1, "tool_call_id"),
    "result of another call": ([USER, calls(call()), result("b")], 2, "tool_call_id"),
    "result of an earlier message's call": (
        [calls(call()), result(), {"role": "assistant", "content": "ok"}, result()],
        3,
        "tool_call_id",
    ),
    "result twice": ([USER, calls(call("a"), call("b")), result(), result()], 3, "tool_call_id"),
    "user before the result": ([USER, calls(call()), USER], 1, "tool_calls"),
    "system before the second result": (
        [calls(call("a"), call("b")), result("a"), {"role": "system", "content": ""}, result("b")],
        0,
        "tool_calls",
    ),
    "ends before the result": ([USER, calls(call("a"), call("b")), result("a")], 1, "tool_calls"),
    "reasoning is a number": ([{"role": "assistant", "content": "", "reasoning": 3}], 0, "reasoning"),
}


@pytest.mark.parametrize(("raw", "index", "field"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_conversation_is_refused_by_place(raw: object, index: int | None, field: str | None) -> None:
    with pytest.raises(InvalidMessagesError) as refused:
        parse_messages(raw)
    assert (refused.value.index, refused.value.field) == (index, field)
    assert "; " in str(refused.value)
    str(refused.value).encode()


def test_an_unanswered_call_is_named_by_its_id() -> None:
    with pytest.raises(InvalidMessagesError, match="'b'"):
        parse_messages([USER, calls(call("a"), call("b")), result("a")])


def test_a_conversation_may_end_with_open_calls_if_asked_for() -> None:
    raw = [USER, calls(call("a"), call("b")), result("a")]
    assert len(parse_messages(raw, allow_open_calls=True)) == 3
    with pytest.raises(InvalidMessagesError):
        parse_messages([*raw, USER], allow_open_calls=True)


def test_what_clients_send_is_understood() -> None:
    parsed = parse_messages(
        [
            {
                "role": "developer",
                "content": [{"type": "text", "text": "Be"}, {"type": "input_text", "text": "brief."}],
            },
            {"role": "user", "content": "Hello", "tool_calls": None, "unknown": 1},
            {"role": "assistant", "content": "", "tool_calls": [], "reasoning_content": "Hm."},
            {"role": "assistant", "content": None, "reasoning": "Only this."},
            {"role": "assistant", "content": None, "refusal": "No."},
            calls(call("x", ""), call("y", {"b": 1}, name="find")),
            {**result("y", ""), "name": "whatever"},
            result("x"),
        ]
    )
    assert [m.role for m in parsed[:3]] == [Role.SYSTEM, Role.USER, Role.ASSISTANT]
    assert [m.content for m in parsed] == ["Be\nbrief.", "Hello", "", "", "No.", "", "", "done"]
    assert [m.reasoning for m in parsed[2:5]] == ["Hm.", "Only this.", None]
    assert parsed[5].tool_calls == (ToolCall("x", "look", "{}"), ToolCall("y", "find", '{"b": 1}'))
    assert [(m.name, m.call_ordinal) for m in parsed[6:]] == [("find", 1), ("look", 0)]


def test_a_parsed_conversation_reads_back_equal() -> None:
    raw = [USER, {**calls(call("a", '{"x":  1}')), "reasoning": "Hm."}, result()]
    parsed = parse_messages(raw)
    assert parse_messages([message.to_openai() for message in parsed]) == parsed


def test_the_key_overlooks_ids_spacing_key_order_and_reasoning() -> None:
    one = parse_messages([{**calls(call("a", '{"x": 1, "y": "é"}')), "reasoning": "Hm."}, result("a")])
    other = parse_messages([calls(call("b", '{"y":"\\u00e9","x":1}')), result("b")])
    assert [m.key for m in one] == [m.key for m in other]


@pytest.mark.parametrize(
    "other",
    [
        Message(Role.USER, "Look."),
        Message(Role.ASSISTANT, "Look!"),
        Message(Role.ASSISTANT, "Look.", (ToolCall("a", "look", '{"x": 2}'),)),
        Message(Role.ASSISTANT, "Look.", (ToolCall("a", "find", '{"x": 1}'),)),
        Message(Role.ASSISTANT, "Look.", (ToolCall("a", "look", '{"x": 1}'),), name="Ann"),
        Message(Role.ASSISTANT, "Look.", (ToolCall("a", "look", '{"x": 1}'),), call_ordinal=1),
    ],
)
def test_the_key_tells_apart_what_is_said(other: Message) -> None:
    assert Message(Role.ASSISTANT, "Look.", (ToolCall("a", "look", '{"x": 1}'),)).key != other.key


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
nearly_messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]) | json_values,
        "content": st.text(st.characters()) | json_values,
        "tool_call_id": st.sampled_from(["a", "b"]) | json_values,
        "tool_calls": json_values
        | st.lists(
            st.fixed_dictionaries(
                {
                    "id": st.sampled_from(["a", "b"]) | json_values,
                    "type": st.just("function") | json_values,
                    "function": st.fixed_dictionaries(
                        {"name": st.text() | json_values, "arguments": json_values.map(json.dumps) | json_values}
                    ),
                }
            ),
            max_size=2,
        ),
        "name": json_values,
        "reasoning": json_values,
    },
)


@given(json_values | st.lists(json_values | nearly_messages, max_size=5))
def test_no_json_does_anything_but_parse_or_be_refused(raw: object) -> None:
    try:
        parsed = parse_messages(raw)
    except InvalidMessagesError:
        return
    assert parse_messages([message.to_openai() for message in parsed]) == parsed


@given(json_values | st.lists(json_values, max_size=3))
def test_no_json_given_as_tools_does_anything_but_parse_or_be_refused(raw: object) -> None:
    try:
        parse_tools(raw)
    except InvalidMessagesError:
        return
    assert raw in (None, [])


def test_good_tools_pass_unchanged() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}
    assert parse_tools([tool]) == (tool,)
    assert parse_tools(None) == parse_tools([]) == ()


@pytest.mark.parametrize(
    "tool",
    [
        "look",
        {"function": {"name": "look"}},
        {"type": "function"},
        {"type": "function", "function": {"name": ""}},
        {"type": "function", "function": {"name": "look", "description": 3}},
        {"type": "function", "function": {"name": "look", "parameters": []}},
        {"type": "function", "function": {"name": "look", "parameters": {"x": float("inf")}}},
        {"type": "function", "function": {"name": "look", "parameters": {"x": "\ud800"}}},
        {"type": "function", "function": {"name": "look", "parameters": {"x": nested(9999)}}},
    ],
)
def test_a_bad_tool_is_refused_by_place(tool: object) -> None:
    good = {"type": "function", "function": {"name": "find"}}
    with pytest.raises(InvalidMessagesError, match=r"tools\[1\]") as refused:
        parse_tools([good, tool])
    assert refused.value.field == "tools[1]"


def test_two_tools_of_one_name_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "find"}}
    with pytest.raises(InvalidMessagesError, match="repeats"):
        parse_tools([tool, tool])
