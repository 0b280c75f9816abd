from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.conversations import TOOLS, call, conversation, requests_of, result, score_all, tiny_engine

from turnkv.config import SamplingParams
from turnkv.engine import Engine, Generation
from turnkv.engine.journal import Shift
from turnkv.errors import (
    InvalidFileError,
    InvalidMessagesError,
    OutOfPositionsError,
    OverBudgetError,
    TurnKVError,
    UnknownSessionError,
    UnknownTurnError,
)
from turnkv.policy import Keep, Policy, Window
from turnkv.types import SessionId

NARROW = Policy(name="narrow", window=Window(high=3, low=1), keep=Keep(recent=0))
REFUSING = Policy(name="refusing", window=Window(high=3, low=1, overflow="refuse"))
TOKEN = 1024
"""KV bytes of one token of the tiny Llama."""


def state(engine: Engine) -> dict[str, Any]:
    """All that a refused or cancelled request must leave as it was."""
    return {
        session.id: (
            session.view.hash,
            [(len(r.tokens), r.num_computed, r.is_dropped, r.message) for r in session.records],
            session.is_busy,
            [segment.owners for segment in session.view.segments],
            list(session.journal),
        )
        for session in engine._table
    } | {"live": engine.stats.live_bytes}


def asks(text: str, *, tokens: int = 8) -> tuple[list[dict[str, Any]], SamplingParams]:
    return [{"role": "user", "content": text}], SamplingParams(max_new_tokens=tokens)


def asked(engine: Engine, text: str, *, tokens: int = 8) -> Generation:
    messages, sampling = asks(text, tokens=tokens)
    return engine.generation(messages, sampling=sampling)


def run_all(engine: Engine, *requests: Generation) -> None:
    while not all(request.is_done for request in requests):
        engine.step()
        engine.check()
        assert engine.stats.held_bytes <= engine.stats.budget_bytes
        assert engine.stats.live_bytes <= engine.stats.held_bytes


def is_all_free(engine: Engine) -> bool:
    for session in list(engine._table):
        engine.close_session(session.id)
    engine.check()
    return engine.stats.held_bytes == engine.stats.live_bytes == engine.stats.num_segments == 0


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_request_over_the_budget_is_refused_and_nothing_has_changed() -> None:
    engine = tiny_engine(budget_bytes=300 * TOKEN, policy=NARROW)
    score_all(engine, conversation(1, with_tools=False))
    engine.respond(asks("Other.")[0], sampling=SamplingParams(max_new_tokens=2))
    before = state(engine)
    history = [*conversation(1, with_tools=False), {"role": "user", "content": "x" * 400}]
    with pytest.raises(OverBudgetError, match="turn 1"):
        engine.respond(history, sampling=SamplingParams(max_new_tokens=4))
    assert state(engine) == before
    assert engine.stats.num_given_up == 0
    engine.check()


@pytest.mark.parametrize("policy", [Policy(name="full"), REFUSING])
def test_a_request_over_the_positions_is_refused_and_nothing_has_changed(policy: Policy) -> None:
    engine = tiny_engine(max_positions=200, policy=policy)
    score_all(engine, conversation(1, with_tools=False))
    before = state(engine)
    history = [*conversation(1, with_tools=False), {"role": "user", "content": "x" * 200}]
    with pytest.raises(OutOfPositionsError, match="turn 1"):
        engine.respond(history, sampling=SamplingParams(max_new_tokens=4))
    assert state(engine) == before
    engine.check()


@pytest.mark.parametrize("known", [0, 3])
def test_a_conversation_that_the_template_refuses_leaves_nothing_behind(known: int) -> None:
    engine = tiny_engine()
    messages = conversation(1, with_tools=False)
    if known:
        engine.score(messages)
    before = state(engine)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InvalidMessagesError("cannot be rendered", remedy="leave it out")

    engine.renderer.head = refuse  # type: ignore[method-assign]
    engine.renderer.render = refuse  # type: ignore[method-assign]
    with pytest.raises(InvalidMessagesError):
        engine.respond([*messages, {"role": "user", "content": "And?"}])
    with pytest.raises(InvalidMessagesError):
        engine.respond([{"role": "user", "content": "Else?"}])
    assert state(engine) == before
    assert engine.stats.num_sessions == bool(known)


def test_a_replys_room_shrinks_to_what_budget_and_positions_leave_and_no_further() -> None:
    for kwargs in (
        {"max_positions": 100},
        {"budget_bytes": 112 * TOKEN},
        {"max_positions": 96, "budget_bytes": 96 * TOKEN},
    ):
        engine = tiny_engine(**kwargs)  # type: ignore[arg-type]
        request = asked(engine, "Hi.", tokens=500)
        engine.submit(request)
        limit = min(kwargs.get("max_positions", 9999), engine.stats.budget_bytes // TOKEN)
        assert request.admission is not None
        assert request.admission.prompt_tokens + request.max_new_tokens == limit
        run_all(engine, request)


def test_drops_that_leave_holes_never_make_a_request_impossible() -> None:
    engine = tiny_engine(budget_bytes=416 * TOKEN, policy=NARROW)
    messages = conversation(12, with_tools=False)
    for index in requests_of(messages):
        score = engine.score(messages[: index + 1])
        engine.check()
        assert engine.stats.peak_held_bytes <= engine.stats.budget_bytes
        usage = score.usage
        assert usage.prompt_tokens == usage.cached_tokens + usage.computed_tokens + usage.dropped_tokens
    assert usage.dropped_tokens


def test_a_session_with_too_many_holes_is_computed_afresh_where_its_pages_do_not_fit_and_its_tokens_would() -> None:
    engine = tiny_engine(budget_bytes=496 * TOKEN)
    messages = conversation(8, with_tools=False)
    first = engine.score(messages)
    for turn in (0, 2, 4, 6):
        engine.drop(first.session_id, turn)
    session = engine.session(first.session_id)
    assert len(session.pages()) * 16 > session.num_held_tokens, "no hole was made"
    request = engine.generation([*messages, *asks("And?")[0]], sampling=SamplingParams(max_new_tokens=400))
    engine.submit(request)
    assert request.session not in (None, session)
    assert request.admission is not None
    assert request.admission.dropped_tokens == request.admission.cached_tokens == 0
    engine.cancel(request)
    engine.check()


# -- cancelling and interruptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 6, 9, 12])
@pytest.mark.parametrize("max_positions", [4096, 160])
def test_cancelling_at_any_moment_takes_the_request_back(num_steps: int, max_positions: int) -> None:
    engine = tiny_engine(step=24, policy=NARROW, max_positions=max_positions)
    messages = conversation(2, with_tools=False)
    first = engine.score(messages)
    session = engine.session(first.session_id)
    before = [(len(r.tokens), r.message) for r in session.records]
    request = engine.generation(
        [*messages, {"role": "user", "content": "x" * 80}], sampling=SamplingParams(max_new_tokens=40)
    )
    engine.submit(request)
    for _ in range(num_steps):
        engine.step()
    assert not request.is_done
    engine.cancel(request)
    engine.check()
    assert [(len(r.tokens), r.message) for r in session.records] == before
    assert not session.is_busy
    assert engine.stats.held_bytes - engine.stats.live_bytes < 16 * TOKEN * 8, "reserved room was given back"
    with pytest.raises(TurnKVError, match="cancelled"):
        engine.reply(request)
    again = tiny_engine(max_positions=max_positions).restore(session.journal)
    assert again.view.hash == session.view.hash
    follow = engine.score([*messages, {"role": "user", "content": "x" * 80}, messages[2]])
    assert follow.session_id == first.session_id
    assert is_all_free(engine)


def test_cancelling_after_a_fold_takes_back_what_the_fold_had_sealed() -> None:
    engine = tiny_engine(step=24, policy=NARROW, max_positions=160)
    messages = conversation(1, with_tools=False)
    first = engine.score(messages)
    session = engine.session(first.session_id)
    request = engine.generation([*messages, {"role": "user", "content": "x" * 150}])
    engine.submit(request)
    while not any(isinstance(event, Shift) and event.reason == "fold" for event in session.journal):
        engine.step()
    engine.cancel(request)
    engine.check()
    assert len(session.records) == len(messages)
    assert session.num_held_tokens == sum(len(record.tokens) for record in session.records if not record.is_dropped)
    assert tiny_engine(max_positions=160).restore(session.journal).view.hash == session.view.hash


def test_cancelling_a_prefill_leaves_the_end_of_the_reply_before_it_to_be_computed() -> None:
    engine = tiny_engine(step=8)
    first = engine.respond(asks("One.")[0], sampling=SamplingParams(max_new_tokens=3))
    session = engine.session(first.session_id)
    before, unread = state(engine), session.pending()
    follow = [*asks("One.")[0], first.message.to_openai(), *asks("Two, if you please.")[0]]
    request = engine.generation(follow)
    engine.submit(request)
    engine.step()
    engine.cancel(request)
    engine.check()
    assert state(engine) == before
    assert session.pending() == unread != []


def test_cancelling_a_request_whose_history_was_dropped_before_it_was_computed_is_journalled() -> None:
    engine = tiny_engine(step=8, policy=NARROW)
    first = engine.score(conversation(1, with_tools=False))
    session = engine.session(first.session_id)
    request = engine.generation(conversation(8, with_tools=False)[:-1])
    engine.submit(request)
    assert request.session is session
    assert any(record.is_dropped for record in session.records[3:]), "turns that the session had never seen"
    engine.cancel(request)
    score = engine.score(
        [*conversation(1, with_tools=False), *asks("Else?")[0], {"role": "assistant", "content": "No."}]
    )
    assert score.session_id == first.session_id
    again = tiny_engine(policy=NARROW).restore(session.journal)
    assert [record.is_dropped for record in again.records] == [record.is_dropped for record in session.records]
    again.check()


def test_cancelling_a_scoring_takes_its_reply_back() -> None:
    engine = tiny_engine(step=4)
    messages = conversation(2, with_tools=False)
    first = engine.score(messages[:3])
    before = state(engine)
    request = engine.scoring(messages)
    engine.submit(request)
    while request.ttft_s is None:
        engine.step()
    engine.step()
    engine.cancel(request)
    engine.check()
    assert state(engine) == before
    assert engine.score(messages).session_id == first.session_id


def test_a_cancelled_new_session_is_gone_with_all_its_memory() -> None:
    engine = tiny_engine(step=8)
    request = asked(engine, "Tell me.")
    engine.submit(request)
    engine.step()
    engine.cancel(request)
    engine.cancel(request)
    engine.check()
    assert engine.stats.num_sessions == engine.stats.held_bytes == 0


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [0, 3, 5])
def test_an_interrupted_step_takes_every_request_in_it_back(error: BaseException, after: int) -> None:
    engine = tiny_engine(step=64)
    kept = engine.score(conversation(1, with_tools=False))
    before = state(engine)
    follow = [*conversation(1, with_tools=False), {"role": "user", "content": "More?"}]
    requests = [engine.generation(follow), asked(engine, "One."), asked(engine, "Two, if you please.")]
    for request in requests:
        engine.submit(request)
    for _ in range(after):
        engine.step()
    run = engine.runner.run

    def fail(*args: Any) -> Any:
        run(*args)
        raise error

    engine.runner.run = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(type(error)):
        run_all(engine, *requests)
    engine.runner.run = run  # type: ignore[method-assign]
    engine.check()
    assert state(engine) == before or after == 0
    run_all(engine, *requests)
    taken_back = [request for request in requests if request.error is not None]
    assert taken_back
    for request in taken_back:
        with pytest.raises(type(error)):
            engine.reply(request)
    assert engine.respond(follow).session_id == kept.session_id
    assert is_all_free(engine)


def test_a_callback_that_fails_ends_its_own_request_alone() -> None:
    engine = tiny_engine()

    def fail(text: str) -> None:
        raise BrokenPipeError("the client went away")

    messages, sampling = asks("One.", tokens=12)
    broken = engine.generation(messages, sampling=sampling, on_text=fail)
    other = asked(engine, "Two.")
    for request in (broken, other):
        engine.submit(request)
    run_all(engine, broken, other)
    assert engine.reply(other).tokens == tiny_engine().respond(asks("Two.")[0], sampling=asks("", tokens=8)[1]).tokens
    with pytest.raises(BrokenPipeError):
        engine.reply(broken)
    with pytest.raises(BrokenPipeError):
        engine.respond(messages, sampling=sampling, on_text=fail)
    assert engine.stats.num_sessions == 1


def test_a_callback_may_cancel_its_own_request() -> None:
    engine = tiny_engine()
    messages, sampling = asks("One.", tokens=12)
    request = engine.generation(messages, sampling=sampling, on_text=lambda text: engine.cancel(request))
    engine.submit(request)
    run_all(engine, request)
    assert engine.stats.num_sessions == engine.stats.held_bytes == 0


def test_closing_a_session_cancels_the_request_that_is_computed_for_it() -> None:
    engine = tiny_engine(step=8)
    for messages in ([*conversation(1, with_tools=False), {"role": "user", "content": "More?"}], asks("New.")[0]):
        engine.score(conversation(1, with_tools=False))
        request = engine.generation(messages)
        engine.submit(request)
        engine.step()
        assert request.session is not None
        engine.close_session(request.session.id)
        engine.check()
        assert request.is_done
        engine.step()
    assert is_all_free(engine)


# -- waiting and giving up -----------------------------------------------------------------------------------------


def test_requests_without_room_wait_their_turn_and_all_are_answered() -> None:
    engine = tiny_engine(budget_bytes=160 * TOKEN)
    requests = [asked(engine, f"Number {number}?", tokens=30) for number in range(6)]
    for request in requests:
        engine.submit(request)
    assert [request.session is not None for request in requests] == [True, True, False, False, False, False]
    run_all(engine, *requests)
    alone = tiny_engine().respond(asks("Number 5?")[0], sampling=SamplingParams(max_new_tokens=30))
    assert engine.reply(requests[5]).tokens == alone.tokens
    assert all(engine.reply(request).message for request in requests), "results outlive sessions given up"
    assert engine.stats.num_given_up > 0
    assert is_all_free(engine)


def test_a_waiting_request_that_cannot_be_served_any_more_does_not_block_the_others() -> None:
    engine = tiny_engine(budget_bytes=96 * TOKEN)
    first, second = asked(engine, "One?", tokens=30), asked(engine, "Two?", tokens=30)
    engine.submit(first)
    engine.submit(second)
    messages, sampling = asks("Two?", tokens=30)
    gone = engine.generation(messages, sampling=sampling, session_id=SessionId("gone"))
    huge = engine.generation(asks("x" * 300)[0], sampling=sampling)
    last = asked(engine, "Three?", tokens=30)
    for request in (gone, huge, last):
        engine.submit(request)
    run_all(engine, first, second, gone, huge, last)
    assert engine.reply(last).tokens
    with pytest.raises(UnknownSessionError):
        engine.reply(gone)
    with pytest.raises(OverBudgetError):
        engine.reply(huge)


def test_a_waiting_request_can_be_cancelled_and_the_next_takes_its_place() -> None:
    engine = tiny_engine(budget_bytes=96 * TOKEN)
    first, second, third = (asked(engine, f"Number {number}?", tokens=30) for number in range(3))
    for request in (first, second, third):
        engine.submit(request)
    engine.cancel(second)
    run_all(engine, first, third)
    assert second.is_done
    assert engine.reply(third).tokens


def test_no_idle_session_is_given_up_where_even_all_of_them_would_not_make_room() -> None:
    engine = tiny_engine(budget_bytes=256 * TOKEN)
    idle = engine.respond(asks("Idle.")[0], sampling=SamplingParams(max_new_tokens=2))
    busy = asked(engine, "Busy.", tokens=100)
    waits = asked(engine, "Waits.", tokens=180)
    engine.submit(busy)
    engine.submit(waits)
    assert waits.session is None
    assert engine.session(idle.session_id)
    assert engine.stats.num_given_up == 0
    run_all(engine, busy, waits)


def test_the_session_used_last_is_given_up_last_and_a_shared_beginning_survives() -> None:
    engine = tiny_engine(budget_bytes=320 * TOKEN)
    messages = conversation(2, with_tools=False)
    old = engine.score(messages)
    fork = engine.score([*messages[:3], {"role": "user", "content": "Else?"}, messages[2]])
    engine.respond([*messages[:3], {"role": "user", "content": "Else?"}, messages[2], *asks("y" * 150)[0]])
    engine.check()
    with pytest.raises(UnknownSessionError):
        engine.session(old.session_id)
    assert engine.session(fork.session_id).num_held_tokens > 0
    assert engine.stats.num_given_up == 1


def test_a_session_that_was_given_up_is_computed_again() -> None:
    engine = tiny_engine(budget_bytes=192 * TOKEN)
    messages = conversation(1, with_tools=False)
    engine.score(messages)
    engine.respond(asks("z" * 100)[0], sampling=SamplingParams(max_new_tokens=40))
    again = engine.score([*messages, {"role": "user", "content": "And?"}, messages[2]])
    assert again.usage.cached_tokens == 0
    engine.check()


# -- policy --------------------------------------------------------------------------------------------------------


def usage_adds_up(usage: Any) -> bool:
    return bool(usage.prompt_tokens == usage.cached_tokens + usage.computed_tokens + usage.dropped_tokens)


def test_a_long_history_seen_for_the_first_time_is_dropped_before_it_is_computed() -> None:
    engine = tiny_engine(policy=Policy(name="window", window=Window(high=8, low=5)))
    messages = conversation(100, with_tools=False)[:-1]
    reply = engine.respond(messages, sampling=SamplingParams(max_new_tokens=2))
    usage = reply.usage
    assert usage_adds_up(usage)
    assert usage.cached_tokens == 0
    assert usage.dropped_turns == tuple(range(94))
    assert usage.computed_tokens < usage.dropped_tokens
    session = engine.session(reply.session_id)
    assert engine.stats.live_bytes == session.num_held_tokens * TOKEN
    follow = engine.respond([*messages, reply.message.to_openai(), {"role": "user", "content": "And?"}])
    assert follow.session_id == reply.session_id
    assert usage_adds_up(follow.usage)
    assert follow.usage.dropped_tokens >= usage.dropped_tokens
    again = tiny_engine(policy=engine.policy).restore(session.journal)
    assert again.view.hash == session.view.hash


def test_the_latest_user_message_stays_through_a_long_tool_loop() -> None:
    engine = tiny_engine(policy=NARROW)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Do it."}]
    for number in range(8):
        messages += [call(number), result(number, f"value {number}")]
    messages.append({"role": "assistant", "content": "Done."})
    for index in requests_of(messages):
        score = engine.score(messages[: index + 1], TOOLS)
        records = engine.session(score.session_id).records
        assert not records[1].is_dropped
        assert all(a.is_dropped == b.is_dropped for a, b in zip(records[2:-1:2], records[3:-1:2], strict=False))
        assert usage_adds_up(score.usage)
    assert sum(record.is_dropped for record in records) >= 8


def test_a_turn_whose_results_no_answer_has_read_is_open_though_another_follows() -> None:
    engine = tiny_engine(policy=Policy(name="none", window=Window(high=1, low=0), keep=Keep(recent=0)))
    messages = [*conversation(2), {"role": "user", "content": "Look."}, call(9), result(9, "value 9")]
    messages.append({"role": "user", "content": "And?"})
    reply = engine.respond(messages, TOOLS, sampling=SamplingParams(max_new_tokens=2))
    session = engine.session(reply.session_id)
    unread = [
        record for record, message in zip(session.records[1:], messages[1:], strict=False) if message in messages[-4:]
    ]
    assert reply.usage.dropped_turns == (0, 1, 2)
    assert not any(record.is_dropped for record in unread)
    later = [
        *messages,
        reply.message.to_openai(),
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "."},
    ]
    later += [{"role": "user", "content": "So?"}]
    assert 3 in engine.respond(later, TOOLS, sampling=SamplingParams(max_new_tokens=2)).usage.dropped_turns


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_pinned_turn_is_never_dropped(by_hand: bool) -> None:
    keep = Keep(recent=0) if by_hand else Keep(recent=0, pinned=("thing 2",))
    engine = tiny_engine(policy=Policy(name="pins", window=Window(high=2, low=0), keep=keep))
    messages = conversation(10, with_tools=False)
    for index in requests_of(messages):
        score = engine.score(messages[: index + 1])
        if by_hand and index == 6:
            engine.pin(score.session_id, 2)
    session = engine.session(score.session_id)
    assert [record.is_dropped for record in session.records[1:9]] == [True] * 4 + [False] * 2 + [True] * 2
    with pytest.raises(UnknownTurnError):
        engine.drop(session.id, 2)


def test_a_drop_by_hand_frees_exactly_its_turn_and_takes_nothing_open() -> None:
    engine = tiny_engine()
    messages = conversation(4)
    score, _ = score_all(engine, messages, TOOLS)
    session = engine.session(score.session_id)
    live = engine.stats.live_bytes
    gone = engine.drop(session.id, 1)
    assert engine.stats.live_bytes == live - gone * TOKEN
    assert engine.drop(session.id, 1) == 0
    assert sum(event.kind == "drop" for event in session.journal) == 1
    for turn in (-1, len(messages)):
        with pytest.raises(UnknownTurnError):
            engine.drop(session.id, turn)
        with pytest.raises(UnknownTurnError):
            engine.pin(session.id, turn)
    request = engine.generation([*messages, {"role": "user", "content": "And?"}], TOOLS)
    engine.submit(request)
    with pytest.raises(UnknownTurnError, match="while"):
        engine.drop(session.id, 0)
    run_all(engine, request)


def test_cleared_results_go_and_the_chat_around_them_stays() -> None:
    keep = Keep(tool_results="clear", recent=1)
    engine = tiny_engine(policy=Policy(name="clear", window=Window(high=3, low=2), keep=keep))
    score, _ = score_all(engine, conversation(4), TOOLS)
    records = engine.session(score.session_id).records
    dropped = [record for record in records if record.is_dropped]
    assert dropped
    assert any(record.is_result_or_call for record in dropped)


def test_a_byte_budget_holds_a_session_below_itself_at_every_request() -> None:
    budget = 260 * TOKEN
    engine = tiny_engine(policy=Policy(name="bytes", window=Window(high=8, low=4, budget_bytes=budget)))
    messages = conversation(12)
    dropped = set()
    for index in requests_of(messages):
        score = engine.score(messages[: index + 1], TOOLS[:0])
        dropped |= set(score.usage.dropped_turns)
        assert score.usage.kv_bytes <= budget
    assert dropped


def test_a_policy_given_in_mid_session_counts_from_the_next_request_on() -> None:
    engine = tiny_engine()
    messages = conversation(8, with_tools=False)
    score = engine.score(messages[:-2])
    assert not score.usage.dropped_turns
    engine.policy = NARROW
    later = engine.score(messages)
    assert later.session_id == score.session_id
    assert later.usage.dropped_turns == (0, 1, 2, 3, 4, 5)
    engine.check()


def test_a_window_of_eight_turns_holds_at_most_half_of_what_full_holds_over_forty() -> None:
    messages = conversation(40)

    def peak(policy: Policy) -> int:
        engine = tiny_engine(policy=policy, max_positions=16384)
        most = 0
        for index in requests_of(messages):
            session = engine.session(engine.score(messages[: index + 1], TOOLS).session_id)
            last_user = max(
                i for i, record in enumerate(session.records) if record.message and record.message.role == "user"
            )
            most = max(most, sum(record.num_held for record in session.records[1:last_user]))
        return most

    assert peak(Policy(name="window", window=Window(high=8, low=5))) <= peak(Policy(name="full")) / 2


# -- journals ------------------------------------------------------------------------------------------------------


def damaged(change: Callable[[list[Any]], Any]) -> list[Any]:
    engine = tiny_engine()
    score, _ = score_all(engine, conversation(3, with_tools=False))
    engine.drop(score.session_id, 0)
    events = list(engine.session(score.session_id).journal)
    change(events)
    return events


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_journal_that_lacks_a_line_is_refused_and_leaves_nothing_behind(at: int) -> None:
    events = damaged(lambda events: events.pop(at))
    other = tiny_engine()
    with pytest.raises(InvalidFileError):
        other.restore(events)
    assert other.stats.num_sessions == other.stats.held_bytes == 0


def test_a_journal_is_refused_for_another_model_and_for_a_session_that_is_held() -> None:
    engine = tiny_engine()
    score = engine.score(conversation(1, with_tools=False))
    journal = engine.session(score.session_id).journal
    with pytest.raises(InvalidFileError, match="held already"):
        engine.restore(journal)
    with pytest.raises(InvalidFileError, match="'llama'"):
        tiny_engine("qwen2").restore(journal)
    other = tiny_engine()
    other.restore(journal)
    fresh = other.respond(asks("New.")[0], sampling=SamplingParams(max_new_tokens=2))
    assert fresh.session_id != score.session_id
    other.check()
