import json
from typing import Any

import pytest
from tests.engine.conversations import tiny_engine

from turnkv.config import SamplingParams
from turnkv.engine import Engine
from turnkv.errors import InvalidMessagesError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["n"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("look", "take")
]
ASKED = [{"role": "user", "content": "Look at 5."}]


def generated(engine: Engine, tools: Any, **settings: Any) -> Any:
    request = engine.generation(ASKED, tools, sampling=SamplingParams(max_new_tokens=300, **settings), must_call=True)
    engine.submit(request)
    while not request.is_done:
        engine.step()
    return engine.reply(request)


@pytest.mark.parametrize("seed", range(4))
def test_a_reply_that_must_call_is_a_valid_call_whatever_the_model(seed: int) -> None:
    reply = generated(tiny_engine(), TOOLS, temperature=2.0, seed=seed)
    if reply.finish_reason == "length":
        pytest.skip("a random model may go on calling for ever")
    assert reply.finish_reason == "tool_calls"
    assert not reply.message.content
    for call in reply.message.tool_calls:
        assert call.name in ("look", "take")
        assert 0 <= json.loads(call.arguments)["n"] <= 9


def test_without_it_a_random_model_writes_no_call() -> None:
    engine = tiny_engine()
    assert not engine.respond(ASKED, TOOLS).message.tool_calls


def test_parameters_that_are_no_schema_are_refused_by_name() -> None:
    tools = [{"type": "function", "function": {"name": "bad", "parameters": {"type": "no such type"}}}]
    with pytest.raises(InvalidMessagesError, match=r"tools.*cannot be followed"):
        generated(tiny_engine(), tools)
