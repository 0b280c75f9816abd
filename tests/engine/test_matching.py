from typing import Any

import pytest
from tests.engine.conversations import TOOLS, conversation, requests_of, score_all, tiny_engine

from turnkv.config import SamplingParams
from turnkv.engine import Engine, Session
from turnkv.errors import UnknownSessionError
from turnkv.policy import Keep, Policy, Window
from turnkv.types import SessionId

SHORT = SamplingParams(max_new_tokens=6)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


def lengths(session: Session) -> list[int]:
    return [len(record.tokens) for record in session.records]


def edited(messages: list[dict[str, Any]], index: int, content: str) -> list[dict[str, Any]]:
    return [message | {"content": content} if i == index else message for i, message in enumerate(messages)]


def test_a_longer_history_extends_its_session_and_computes_only_what_is_new(engine: Engine) -> None:
    messages = conversation(3, with_tools=False)
    first = engine.score(messages[:3])
    held = engine.session(first.session_id).num_held_tokens
    second = engine.score(messages[:5])
    new = lengths(engine.session(second.session_id))[3:]
    header = engine.session(second.session_id).records[-1].header_tokens
    assert second.session_id == first.session_id
    assert second.usage.cached_tokens == held
    assert second.usage.computed_tokens == new[0] + header
    assert second.usage.prompt_tokens == held + new[0] + header


def test_a_generated_reply_that_is_sent_back_extends_the_session_by_its_unread_end_alone(engine: Engine) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Say a thing."}]
    first = engine.respond(messages, sampling=SHORT)
    session = engine.session(first.session_id)
    unread = len(session.pending())
    assert unread == 1 + len(engine.renderer.end_tokens)
    messages += [first.message.to_openai(), {"role": "user", "content": "Go on."}]
    second = engine.respond(messages, sampling=SHORT)
    user = len(session.records[3].tokens)
    assert second.session_id == first.session_id
    assert second.usage.computed_tokens == unread + user + session.records[4].header_tokens


def test_the_same_request_again_shares_all_but_the_generation_prompt(engine: Engine) -> None:
    messages = conversation(2, with_tools=False)[:-1]
    first = engine.respond(messages, sampling=SHORT)
    again = engine.respond(messages, sampling=SHORT)
    assert again.session_id != first.session_id
    assert again.tokens == first.tokens
    assert again.usage.computed_tokens == engine.session(again.session_id).records[-1].header_tokens
    mine, theirs = (engine.session(reply.session_id).view.segments for reply in (again, first))
    assert mine[:-1] == theirs[: len(mine) - 1]
    engine.check()


@pytest.mark.parametrize("index", [1, 3, 4, 6])
def test_an_edit_computes_exactly_from_the_edited_message_on(index: int) -> None:
    engine = tiny_engine()
    messages = conversation(4)
    first, _ = score_all(engine, messages, TOOLS)
    before = lengths(engine.session(first.session_id))
    changed = edited(messages, index, "Something else.") if messages[index]["role"] != "tool" else messages
    assert changed != messages, "a tool result's edit has its own test"
    second = engine.score(changed, TOOLS)
    session = engine.session(second.session_id)
    assert second.session_id != first.session_id
    assert second.usage.cached_tokens == sum(before[:index])
    total = sum(lengths(session)) - second.usage.reply_tokens
    assert second.usage.computed_tokens == total - sum(before[:index])
    assert lengths(engine.session(first.session_id)) == before, "the first session stays as it was"
    engine.check()


def test_an_edited_tool_result_is_computed_again_and_its_call_is_not() -> None:
    engine = tiny_engine()
    messages = conversation(2)
    first, _ = score_all(engine, messages, TOOLS)
    at = next(index for index, message in enumerate(messages) if message["role"] == "tool")
    second = engine.score(edited(messages, at, "value 38"), TOOLS)
    assert second.usage.cached_tokens == sum(lengths(engine.session(first.session_id))[:at])


def test_another_system_text_or_other_tools_share_nothing(engine: Engine) -> None:
    messages = conversation(1, with_tools=False)
    engine.score(messages)
    assert engine.score(edited(messages, 0, "Be long.")).usage.cached_tokens == 0
    assert engine.score(messages, TOOLS).usage.cached_tokens == 0


def test_another_conversation_with_the_same_head_shares_the_head() -> None:
    engine = tiny_engine()
    messages = conversation(2, with_tools=False)
    first = engine.score(messages[:3])
    second = engine.score([messages[0], {"role": "user", "content": "Else?"}, messages[2]])
    assert second.usage.cached_tokens == lengths(engine.session(first.session_id))[0] > 0


def test_a_fork_outlives_the_session_it_came_from() -> None:
    engine = tiny_engine()
    messages = conversation(3, with_tools=False)
    first, _ = score_all(engine, messages)
    second = engine.score(edited(messages, 5, "What else?"))
    engine.close_session(first.session_id)
    engine.check()
    third = engine.score([*edited(messages, 5, "What else?"), {"role": "user", "content": "And?"}, messages[2]])
    assert third.session_id == second.session_id
    engine.close_session(third.session_id)
    engine.check()
    assert engine.stats.held_bytes == engine.stats.live_bytes == engine.stats.num_segments == 0


def test_a_fork_inherits_drops_and_those_pins_whose_turns_it_has() -> None:
    engine = tiny_engine()
    messages = conversation(5, with_tools=False)
    first, _ = score_all(engine, messages)
    engine.drop(first.session_id, 1)
    engine.pin(first.session_id, 0)
    engine.pin(first.session_id, 3)
    second = engine.score(edited(messages, 5, "Thing two?")[:7])
    fork = engine.session(second.session_id)
    assert [record.is_dropped for record in fork.records[:6]] == [False, False, False, True, True, False]
    assert fork.pinned_turns == {0}
    assert second.usage.dropped_tokens == sum(lengths(fork)[3:5])
    again = tiny_engine().restore(fork.journal)
    assert again.journal == fork.journal
    assert again.pinned_turns == fork.pinned_turns
    assert again.view.hash == fork.view.hash


def test_a_fork_behind_a_dropped_end_has_a_journal_that_makes_it_again() -> None:
    engine = tiny_engine()
    messages = conversation(4, with_tools=False)
    first, _ = score_all(engine, messages)
    engine.drop(first.session_id, 2)
    second = engine.score([*messages[:5], {"role": "user", "content": "Other?"}, messages[2]])
    fork = engine.session(second.session_id)
    again = tiny_engine().restore(fork.journal)
    assert again.view.hash == fork.view.hash
    assert again.journal == fork.journal


def test_a_named_session_with_an_edited_history_is_forked_and_stays_itself() -> None:
    engine = tiny_engine()
    messages = conversation(3, with_tools=False)
    first, _ = score_all(engine, messages)
    before = engine.session(first.session_id).view.hash
    second = engine.score(edited(messages, 3, "What then?"), session_id=first.session_id)
    assert second.session_id != first.session_id
    assert second.usage.cached_tokens > 0
    assert engine.session(first.session_id).view.hash == before


def test_a_session_that_is_not_held_is_refused_by_name() -> None:
    engine = tiny_engine()
    with pytest.raises(UnknownSessionError, match="'gone'"):
        engine.score(conversation(1), TOOLS, session_id=SessionId("gone"))
    assert engine.stats.num_sessions == 0


def test_only_the_named_session_is_continued_though_another_matches_longer() -> None:
    engine = tiny_engine()
    messages = conversation(3, with_tools=False)
    short = engine.score(messages[:3])
    long = engine.score(messages[:3])
    engine.score(messages[:5], session_id=long.session_id)
    got = engine.score(messages, session_id=short.session_id)
    assert got.session_id == short.session_id
    assert got.session_id != long.session_id


def test_a_template_without_generation_prompt_computes_the_last_message_again() -> None:
    engine = tiny_engine()
    engine.renderer.generation_header = lambda previous: ()  # type: ignore[method-assign]
    messages = conversation(1, with_tools=False)[:-1]
    first = engine.respond(messages, sampling=SHORT)
    second = engine.respond(messages, sampling=SHORT)
    assert first.tokens == second.tokens
    assert second.usage.computed_tokens == len(engine.session(second.session_id).records[1].tokens)
    engine.check()


def test_every_request_of_a_tool_loop_computes_its_new_messages_alone() -> None:
    engine = tiny_engine()
    messages = conversation(4)
    for index in requests_of(messages):
        score = engine.score(messages[: index + 1], TOOLS)
        usage = score.usage
        session = engine.session(score.session_id)
        known = 0 if index == requests_of(messages)[0] else max(i for i in requests_of(messages) if i < index) + 1
        header = session.records[-1].header_tokens
        assert usage.computed_tokens == sum(lengths(session)[known:-1]) + header
        assert usage.prompt_tokens == usage.cached_tokens + usage.computed_tokens


def test_going_back_to_a_turn_that_was_dropped_meanwhile_computes_it_again() -> None:
    engine = tiny_engine(policy=Policy(name="narrow", window=Window(high=2, low=0), keep=Keep(recent=0)))
    messages = conversation(5, with_tools=False)
    for index in requests_of(messages):
        long = engine.score(messages[: index + 1])
    assert engine.session(long.session_id).records[3].is_dropped
    back = engine.respond(messages[:4], sampling=SHORT)
    session = engine.session(back.session_id)
    assert not session.records[3].is_dropped, "the question that is asked"
    assert back.usage.computed_tokens == sum(lengths(session)[3:4]) + session.records[-1].header_tokens
    engine.check()
