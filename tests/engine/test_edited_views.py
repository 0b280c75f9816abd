from typing import Any

import pytest
import torch
from tests.engine.conversations import TOOLS, conversation, requests_of, score_all, tiny_engine
from tests.engine.masked_oracle import account_of, oracle_logits
from tests.families import FAMILIES, tiny_model
from tests.tolerances import LOGITS

from turnkv.cache import Segment
from turnkv.engine import Engine, Session
from turnkv.engine.journal import Shift
from turnkv.policy import Keep, Policy, Window

NARROW = Policy(name="narrow", window=Window(high=3, low=1), keep=Keep(recent=0))
CLEAR = Policy(name="clear", window=Window(high=3, low=2), keep=Keep(tool_results="clear", recent=1))


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stored(engine: Engine, segment: Segment) -> list[tuple[str, bytes]]:
    """All codes and scales of a segment, by tier."""
    storage = engine._memory.storage
    return [(str(part.tier), storage.bytes_of(part.tier, part.slots)) for part in segment.parts]


def observed_equal_the_oracle(
    engine: Engine,
    family: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    atol: float = LOGITS,
) -> Session:
    """Score a conversation and hold every logit against the masked forward; gives the session."""
    score, got = score_all(engine, messages, tools)
    session = engine.session(score.session_id)
    account, logits = oracle_logits(tiny_model(family, "masked_oracle", engine.runner.dtype), session.journal)
    replies = {i: record for i, record in enumerate(session.records) if record.header_tokens}
    rows = [
        row
        for row, (record, index) in enumerate(account.places)
        if record in replies and replies[record].header_tokens - 1 <= index < len(replies[record].tokens) - 1
    ]
    torch.testing.assert_close(got, logits[rows].to(got.dtype), atol=atol, rtol=0)
    return session


def test_after_drops_logits_equal_one_forward_with_the_dropped_tokens_hidden(family: str) -> None:
    messages = conversation(6, with_tools=False)
    session = observed_equal_the_oracle(tiny_engine(family, policy=NARROW, step=33), family, messages)
    account = account_of(session.journal)
    assert (account.visible.sum(1) < torch.arange(1, len(account.tokens) + 1)).any(), "nothing was dropped"


def test_after_clearing_tool_results_logits_equal_the_masked_forward() -> None:
    observed_equal_the_oracle(tiny_engine(policy=CLEAR), "llama", conversation(8), TOOLS)


def test_after_ranks_close_logits_equal_a_forward_with_keys_rotated_again(family: str) -> None:
    engine = tiny_engine(family, policy=NARROW, max_positions=350)
    session = observed_equal_the_oracle(engine, family, conversation(10, with_tools=False))
    shifts = [event for event in session.journal if isinstance(event, Shift)]
    assert shifts
    assert all(shift.reason == "close_ranks" for shift in shifts)


def test_offsets_of_either_sign_equal_a_forward_with_keys_rotated_again(family: str) -> None:
    engine = tiny_engine(family)
    messages = conversation(4, with_tools=False)
    ends = requests_of(messages)
    rows: list[torch.Tensor] = []
    score = engine.score(messages[: ends[1] + 1])
    session = engine.session(score.session_id)
    # Move the middle of the view by hand, some segments forwards and some backwards.
    entries = session.view.entries
    offsets = {entries[1].segment.key: 300, entries[2].segment.key: 17, entries[3].segment.key: -5}
    session.view = session.view.placed(offsets, session.view.next_position + 400)
    session.journal.append(Shift("by hand", tuple(offsets.items()), session.view.next_position))
    score = engine.score(messages[: ends[2] + 1], observe=lambda logits: rows.append(logits.clone()))
    got = torch.cat(rows)
    _, logits = oracle_logits(tiny_model(family, "masked_oracle"), session.journal)
    torch.testing.assert_close(got, logits[-len(got) - 1 : -1], atol=LOGITS, rtol=0)


@pytest.mark.parametrize("folding_family", ["llama", "yarn", "smollm3", "phi3"])
def test_a_folded_view_equals_a_forward_with_keys_rotated_again(folding_family: str) -> None:
    engine = tiny_engine(folding_family, policy=NARROW, max_positions=128, step=50)
    session = observed_equal_the_oracle(engine, folding_family, conversation(2), TOOLS)
    reasons = {event.reason for event in session.journal if isinstance(event, Shift)}
    assert "fold" in reasons


def test_what_a_query_sees_does_not_depend_on_how_its_prompt_was_cut_into_steps() -> None:
    views = []
    for step in (2048, 64, 5):
        engine = tiny_engine(policy=NARROW, max_positions=128, step=step)
        score, _ = score_all(engine, conversation(5), TOOLS)
        session = engine.session(score.session_id)
        views.append([(entry.segment.key, entry.offset) for entry in session.view.entries])
    assert views[0] == views[1] == views[2]


def test_a_drop_moves_nothing_and_keeps_every_other_segment_bit_for_bit() -> None:
    engine = tiny_engine()
    score, _ = score_all(engine, conversation(6), TOOLS)
    session = engine.session(score.session_id)
    before = {e.segment.key: (e.offset, stored(engine, e.segment)) for e in session.view.entries}
    num_gone = engine.drop(session.id, 2)
    after = {e.segment.key: (e.offset, stored(engine, e.segment)) for e in session.view.entries}
    assert num_gone > 0
    assert len(after) < len(before)
    assert all(before[key] == value for key, value in after.items())
    engine.check()


@pytest.mark.parametrize("max_positions", [4096, 300, 128])
def test_a_journal_makes_the_same_view_again_bit_for_bit(max_positions: int) -> None:
    engine = tiny_engine(policy=NARROW, max_positions=max_positions, step=48)
    score, _ = score_all(engine, conversation(7), TOOLS)
    session = engine.session(score.session_id)
    other = tiny_engine(policy=NARROW, max_positions=max_positions)
    again = other.restore(session.journal)
    other.check()
    assert again.view.hash == session.view.hash
    assert again.view.entries, "an empty view would prove nothing"
    for mine, theirs in zip(session.view.entries, again.view.entries, strict=True):
        assert (mine.segment.key, mine.offset) == (theirs.segment.key, theirs.offset)
        assert stored(engine, mine.segment) == stored(other, theirs.segment)
    assert again.journal == session.journal
