"""Closed turns are stored again in other tiers, and every query sees exactly what the policy says it should."""

from itertools import combinations
from typing import Any

import pytest
import torch
from tests.engine.conversations import TOOLS, conversation, requests_of, score_all, tiny_engine
from tests.engine.test_edited_views import observed_equal_the_oracle, stored
from tests.tolerances import LOGITS

from turnkv.conversation.spans import Classifier
from turnkv.engine import Engine, Session
from turnkv.engine.journal import Extend, Settle
from turnkv.errors import InvalidConfigError
from turnkv.policy import Keep, Old, Policy, Precision, Window
from turnkv.types import EXACT, Tier

INT8, FP8, INT4 = (Tier(name, name) for name in ("int8", "fp8", "int4"))
MIXED = Tier("int8", "int4")
NARROW = Window(high=3, low=1)


def policy_of(rest: Tier = INT8, *, window: Window | None = None, **settings: Any) -> Policy:
    return Policy(
        name="settling",
        window=window,
        keep=Keep(recent=0),
        precision=Precision(rest=rest, **({"exact": ()} | settings)),
    )


AGING = policy_of(INT8, exact=("number", "tool_call"), old=Old(after=1, store=INT4))


@pytest.mark.parametrize("rest", [INT8, FP8, INT4, MIXED], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_logits_equal_one_forward_over_keys_that_were_rounded_when_their_turn_closed(family: str, rest: Tier) -> None:
    # In float64 a code never falls on the other side of a rounding in one of the two.
    engine = tiny_engine(family, policy=policy_of(rest), dtype=torch.float64)
    session = observed_equal_the_oracle(engine, family, conversation(5, with_tools=False))
    assert any(isinstance(event, Settle) for event in session.journal)


def test_logits_equal_one_forward_where_turns_age_and_some_spans_stay_exact() -> None:
    engine = tiny_engine(policy=AGING, dtype=torch.float64)
    session = observed_equal_the_oracle(engine, "llama", conversation(7), TOOLS)
    tiers = {tier for record in session.records for segment in record.segments for tier in segment.tiers}
    assert tiers == {EXACT, INT8, INT4}


def test_settled_turns_are_dropped_moved_and_folded_like_any_other() -> None:
    for positions in (350, 128):
        policy = policy_of(MIXED, window=NARROW)
        engine = tiny_engine(policy=policy, max_positions=positions, step=50, dtype=torch.float64)
        # The oracle turns keys with angles in float32, so that now and then one of them is rounded otherwise.
        session = observed_equal_the_oracle(engine, "llama", conversation(8), TOOLS, atol=20 * LOGITS)
        assert any(entry.offset for entry in session.view.entries)


def test_layers_that_are_excepted_stay_exact_and_the_others_do_not() -> None:
    every = tuple(range(len(tiny_engine().runner.shapes)))
    choices = ((), (0,), (1,), every)
    engines = {layers: tiny_engine(policy=policy_of(INT4, exact_layers=layers)) for layers in choices}
    logits = {layers: score_all(engine, conversation(5))[1] for layers, engine in engines.items()}
    _, exact = score_all(tiny_engine(), conversation(5))
    torch.testing.assert_close(logits[every], exact, atol=LOGITS, rtol=0)
    for one, other in combinations(choices, 2):
        assert (logits[one] - logits[other]).abs().max() > 10 * LOGITS


def test_a_turn_is_exact_for_the_request_that_closes_it_and_settled_for_the_next() -> None:
    engine = tiny_engine(policy=policy_of(INT8))
    messages = conversation(4, with_tools=False)
    settled = []
    for index in requests_of(messages):
        usage = engine.score(messages[: index + 1]).usage
        settled.append(usage.settled_turns)
    assert settled == [(), (), (0,), (1,)]


def test_the_open_turn_and_results_that_nobody_read_are_exact() -> None:
    engine = tiny_engine(policy=policy_of(INT4))
    messages = conversation(4)
    score, _ = score_all(engine, messages, TOOLS)
    forms = [record.form for record in engine.session(score.session_id).records]
    last_user = max(index for index, message in enumerate(messages) if message["role"] == "user")
    # Turn by turn: the last question, call and result lie in a turn that the last answer closed.
    assert forms == ["rest"] * (len(messages) - 1) + ["exact"]
    call_at = last_user + 1
    unread = engine.generation([*messages[: call_at + 2]], TOOLS)
    engine.submit(unread)
    while not unread.is_done:
        session = unread.session
        assert session is not None
        assert [record.form for record in session.records[last_user:]] == ["exact"] * len(session.records[last_user:])
        engine.step()


def test_it_does_not_matter_when_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = conversation(7)
    early, late = tiny_engine(policy=AGING), tiny_engine(policy=AGING)
    monkeypatch.setattr(late, "tidy", lambda: None)
    (one, at_once), (other, when_needed) = (score_all(engine, messages, TOOLS) for engine in (early, late))
    assert torch.equal(at_once, when_needed)
    journals = [engine.session(score.session_id).journal for engine, score in ((early, one), (late, other))]
    done = [[event for event in journal if isinstance(event, Extend | Settle)] for journal in journals]
    # What the last request made due is still to be done in one of them.
    assert done[1] == done[0][: len(done[1])]
    assert all(isinstance(event, Settle) for event in done[0][len(done[1]) :])
    early.check()
    late.check()


def test_a_journal_settles_the_same_bits_again() -> None:
    engine = tiny_engine(policy=AGING)
    score, _ = score_all(engine, conversation(7), TOOLS)
    session = engine.session(score.session_id)
    other = tiny_engine(policy=AGING)
    again = other.restore(session.journal)
    other.check()
    assert again.view.hash == session.view.hash
    assert [stored(other, segment) for segment in again.view.segments] == [
        stored(engine, segment) for segment in session.view.segments
    ]


def test_going_back_to_a_settled_turn_computes_it_again() -> None:
    engine = tiny_engine(policy=policy_of(INT4))
    messages = conversation(5, with_tools=False)
    score_all(engine, messages)
    (first, _, third, *_) = requests_of(messages)
    back = engine.score([*messages[:first], {"role": "assistant", "content": "It is so."}])
    # The first question is computed again; only the head is shared, in the form that it has by now.
    assert back.usage.computed_tokens > len(back.logprobs) - 1
    assert engine.session(back.session_id).records[1].form == "exact"
    later = engine.score([*messages[:third], {"role": "assistant", "content": "No."}])
    assert engine.session(later.session_id).records[third - 1].segments[0].tiers[0] == EXACT


def test_what_is_old_is_not_stored_finer_again_where_a_client_goes_back() -> None:
    policy = policy_of(INT8, old=Old(after=2, store=INT4))
    engine = tiny_engine(policy=policy)
    messages = conversation(8, with_tools=False)
    score_all(engine, messages)
    third = requests_of(messages)[2]
    other = [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Nothing."}]
    back = engine.score([*messages[: third + 1], *other])
    session = engine.session(back.session_id)
    assert session.records[1].form == "old"
    assert set(session.records[1].segments[0].tiers) == {INT4}
    engine.check()


def test_sessions_that_share_a_segment_share_what_it_settles_to() -> None:
    engine = tiny_engine(policy=policy_of(INT8))
    messages = conversation(3, with_tools=False)
    score, _ = score_all(engine, messages)
    alone = engine.stats.live_bytes
    session = engine.session(score.session_id)
    fork = engine.score([*messages[:-1], {"role": "assistant", "content": "It is something else."}])
    other = engine.session(fork.session_id)
    assert other is not session
    shared = {s.key for s in session.view.segments} & {s.key for s in other.view.segments}
    assert shared
    assert engine.stats.live_bytes < 2 * alone
    engine.check()


def test_bytes_are_those_of_the_tiers() -> None:
    engine = tiny_engine(policy=policy_of(INT8, exact=("number",)))
    score, _ = score_all(engine, conversation(6), TOOLS)
    session = engine.session(score.session_id)
    counted = dict.fromkeys(map(str, (EXACT, INT8)), 0)
    for segment in session.view.segments:
        for tier in segment.tiers:
            counted[str(tier)] += engine._memory.token_bytes(tier)
    assert engine.stats.tier_bytes == counted
    assert session.held_bytes == sum(counted.values()) == engine.stats.live_bytes
    assert score.usage.kv_bytes > session.held_bytes, "the last closed turn was settled after the account"


def test_only_what_the_policy_names_is_settled() -> None:
    engine = tiny_engine(policy=policy_of(INT8, exact=("number", "role:tool")))
    score, _ = score_all(engine, conversation(6), TOOLS)
    session = engine.session(score.session_id)
    classifier = Classifier()
    checked = set()
    for record in session.records:
        if record.form == "exact":
            continue
        tiers = [tier for segment in record.segments for tier in segment.tiers]
        for span in engine.renderer.spans(record.message, record.tokens, classifier):
            is_kept = span.span_class == "number" or span.role == "tool"
            assert set(tiers[span.start : span.stop]) <= {EXACT if is_kept else INT8}
            checked.add((is_kept, span.role))
    assert {(True, "tool"), (False, "user"), (True, "assistant")} <= checked


def test_a_budget_that_has_no_room_to_settle_gives_the_session_up() -> None:
    page = 16 * 1024
    messages = conversation(6, with_tools=False)
    for pages in range(14, 40):
        engine = tiny_engine(policy=policy_of(INT4, window=NARROW), budget_bytes=pages * page)
        for index in requests_of(messages):
            engine.score(messages[: index + 1])
            engine.check()
            assert engine.stats.held_bytes <= engine.stats.budget_bytes


def gaps_of(session: Session) -> int:
    return session.num_gap_pages


def test_gaps_that_drops_leave_are_closed_when_the_engine_is_idle() -> None:
    engine = tiny_engine()
    messages = conversation(24, with_tools=False)
    score, _ = score_all(engine, messages[:-1] if messages[-1]["role"] == "user" else messages)
    session = engine.session(score.session_id)
    for turn in range(0, 22, 2):
        engine.drop(session.id, turn)
    before = gaps_of(session)
    held, hashed = engine.stats.held_bytes, session.view.hash
    bits = [stored(engine, segment) for segment in session.view.segments]
    assert before > 4
    engine.tidy()
    engine.check()
    assert gaps_of(session) <= 1
    assert engine.stats.held_bytes < held
    assert session.view.hash == hashed
    assert [stored(engine, segment) for segment in session.view.segments] == bits


def test_memory_goes_back_to_the_system() -> None:
    engine = tiny_engine(policy=policy_of(INT4))
    score, _ = score_all(engine, conversation(12, with_tools=False))
    assert engine.stats.committed_bytes == engine.stats.held_bytes
    engine.close_session(score.session_id)
    engine.tidy()
    assert engine.stats.committed_bytes == engine.stats.held_bytes == 0


@pytest.mark.parametrize("layer", [4, 99])
def test_an_excepted_layer_that_the_model_lacks_is_named(layer: int) -> None:
    with pytest.raises(InvalidConfigError, match=r"precision\.exact_layers"):
        tiny_engine(policy=policy_of(INT8, exact_layers=(layer,)))


def test_settling_is_counted_once_a_turn_even_over_several_messages() -> None:
    engine: Engine = tiny_engine(policy=AGING)
    messages = conversation(6)
    seen: list[int] = []
    for index in requests_of(messages):
        seen += engine.score(messages[: index + 1], TOOLS).usage.settled_turns
    # Each closed turn settles twice: when it closes, and when it has grown old.
    assert all(seen.count(turn) == 2 for turn in set(seen[:4]))
