from hypothesis import given
from hypothesis import strategies as st

from turnkv.conversation.messages import Message, ToolCall
from turnkv.conversation.turns import group_turns, head_length
from turnkv.types import Role, TurnKind

SYSTEM = Message(Role.SYSTEM, "Be brief.")
USER = Message(Role.USER, "Hello")
REPLY = Message(Role.ASSISTANT, "Hello to you")
CALLS = Message(Role.ASSISTANT, "", (ToolCall("a", "look", "{}"), ToolCall("b", "look", "{}")))
RESULTS = [Message(Role.TOOL, "x", (), "a", "look", None, 0), Message(Role.TOOL, "y", (), "b", "look", None, 1)]


def bounds(messages: list[Message]) -> list[tuple[int, int, str]]:
    return [(turn.start, turn.stop, turn.kind.value) for turn in group_turns(messages)]


def test_a_turn_runs_from_user_message_to_user_message() -> None:
    assert bounds([SYSTEM, USER, REPLY, USER, REPLY]) == [(1, 3, "chat"), (3, 5, "chat")]


def test_an_answer_to_results_starts_a_turn_of_its_own() -> None:
    conversation = [USER, CALLS, *RESULTS, CALLS, *RESULTS, REPLY]
    assert bounds(conversation) == [(0, 4, "tool"), (4, 7, "tool"), (7, 8, "chat")]


def test_a_later_system_message_lies_in_the_turn_before_it() -> None:
    assert bounds([SYSTEM, USER, SYSTEM, REPLY, SYSTEM, USER]) == [(1, 5, "chat"), (5, 6, "chat")]


def test_a_conversation_may_begin_with_an_assistant_message() -> None:
    assert bounds([REPLY, REPLY, USER]) == [(0, 2, "chat"), (2, 3, "chat")]


def test_a_call_without_results_yet_makes_a_tool_turn() -> None:
    assert bounds([USER, CALLS]) == [(0, 2, "tool")]


def test_a_head_alone_has_no_turns() -> None:
    assert group_turns([SYSTEM, SYSTEM]) == group_turns([]) == ()


blocks = st.sampled_from([[SYSTEM], [USER], [REPLY], [CALLS, *RESULTS]])


@given(st.lists(blocks, max_size=20))
def test_turns_partition_what_follows_the_head_and_keep_calls_with_results(drawn: list[list[Message]]) -> None:
    conversation = [message for block in drawn for message in block]
    turns = group_turns(conversation)
    covered = [index for turn in turns for index in range(turn.start, turn.stop)]
    assert covered == list(range(head_length(conversation), len(conversation)))
    assert [turn.index for turn in turns] == list(range(len(turns)))
    for turn in turns:
        assert turn.start < turn.stop
        messages = conversation[turn.start : turn.stop]
        assert sum(len(m.tool_calls) for m in messages) == sum(m.role is Role.TOOL for m in messages)
        assert (turn.kind is TurnKind.TOOL) == any(m.tool_calls for m in messages)
