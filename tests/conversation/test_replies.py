import json

import pytest
from tests.conversation.templates import FAMILIES

from turnkv.conversation import hermes
from turnkv.conversation.rendering import Renderer


def test_calls_are_taken_out_of_a_reply() -> None:
    text = (
        'Let me look.\n<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>\n'
        '<tool_call>{"name": "find"}</tool_call>'
    )
    content, calls = hermes.parse_calls(text)
    assert content == "Let me look."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("look", {"at": "é"}), ("find", {})]
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") for call in calls)


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>{</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": []}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {}, "more": 1}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {}}',
        f"<tool_call>{'[' * 99999}</tool_call>",
    ],
)
def test_a_malformed_block_stays_text(block: str) -> None:
    assert hermes.parse_calls(f" {block}\n") == (f" {block}\n", ())
    content, calls = hermes.parse_calls(f'{block} <tool_call>{{"name": "look"}}</tool_call>')
    assert len(calls) == (0 if content.count("<tool_call>") > 1 else 1)


def test_arguments_that_a_model_wrote_as_text_are_read() -> None:
    _, calls = hermes.parse_calls('<tool_call>{"name": "look", "arguments": "{\\"x\\": 1}"}</tool_call>')
    assert json.loads(calls[0].arguments) == {"x": 1}


def test_reasoning_is_read_where_the_template_knows_it() -> None:
    reply = '<think>\nHm.\n</think>\n\nYes.<tool_call>{"name": "look"}</tool_call>'
    content, calls, reasoning = Renderer(FAMILIES["qwen3"].tokenizer()).parse_reply(reply)
    assert (content, len(calls), reasoning) == ("Yes.", 1, "Hm.")


def test_a_reply_keeps_its_tags_where_the_template_knows_none() -> None:
    reply = '<think>Hm.</think>Yes.<tool_call>{"name": "look"}</tool_call>'
    assert Renderer(FAMILIES["llama3"].tokenizer()).parse_reply(reply) == (reply, (), None)


def test_a_template_without_tools_is_answered_in_our_hermes_form() -> None:
    content, calls, _ = Renderer(FAMILIES["smollm2"].tokenizer()).parse_reply('<tool_call>{"name": "a"}</tool_call>')
    assert (content, [call.name for call in calls]) == ("", ["a"])


def test_an_empty_thought_is_no_reasoning() -> None:
    assert hermes.parse_reasoning("<think>\n\n</think>\n\nYes.", is_open=False) == ("Yes.", None)
    assert hermes.parse_reasoning("Yes.", is_open=True) == ("Yes.", None)
