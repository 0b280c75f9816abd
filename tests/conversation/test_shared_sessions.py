import json
from typing import Any

import pytest
from tests.conversation.templates import FAMILIES
from tests.shared_data import shared_file

from turnkv.conversation.messages import parse_messages
from turnkv.conversation.rendering import Renderer
from turnkv.conversation.tools import parse_tools
from turnkv.conversation.turns import group_turns, head_length


def sessions() -> list[dict[str, Any]]:
    return [json.loads(line) for line in shared_file("agent_sessions.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["smollm2", "chatml"])
def test_every_agent_session_parses_groups_and_renders(name: str) -> None:
    tokenizer = FAMILIES[name].tokenizer()
    renderer = Renderer(tokenizer)
    loaded = sessions()
    assert len(loaded) == 70
    for session in loaded:
        messages, tools = parse_messages(session["messages"]), parse_tools(session["tools"])
        head = head_length(messages)
        assert sum(turn.stop - turn.start for turn in group_turns(messages)) == len(messages) - head
        assert renderer.head(messages, tools)
        rendered = renderer.render(messages, tools)
        assert len(rendered) == len(messages) - head
        middle = len(messages) * 2 // 3
        assert renderer.render(messages, tools, middle) == rendered[middle - head :]
