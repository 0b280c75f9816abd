from dataclasses import replace

import pytest
from tests.engine.conversations import TOOLS, conversation, score_all, tiny_engine

from turnkv.errors import InvalidConfigError
from turnkv.policy import FULL, Keep, Policy, Precision, Window
from turnkv.types import Tier

NARROW = Policy(name="narrow", window=Window(high=3, low=1), keep=Keep(recent=0))
CLOSED = replace(NARROW, name="closed", window=Window(high=3, low=1, ranks="closed"))
INT8 = Policy(name="int8", precision=Precision(exact=(), rest=Tier("int8", "int8")))


def test_adopting_a_session_computes_and_copies_nothing() -> None:
    full, narrow = tiny_engine().sharing([FULL, NARROW])
    said = conversation(7)
    score, _ = score_all(full, said[:-2], TOOLS)
    session = full.session(score.session_id)
    before = full.stats
    own = narrow.adopt(session, len(session.messages))
    assert (own.view, full.stats.held_bytes, full.stats.live_bytes) == (
        session.view,
        before.held_bytes,
        before.live_bytes,
    )
    after = narrow.score(said, TOOLS, session_id=own.id)
    assert after.session_id == own.id
    assert after.usage.dropped_turns
    assert full.session(score.session_id).view == session.view
    for engine in (full, narrow):
        engine.check()
        engine.clear()
    assert full.stats.live_bytes == 0


def test_policies_that_share_a_memory_each_get_their_tiers() -> None:
    engines = tiny_engine().sharing([FULL, INT8, NARROW])
    assert engines[0].stats.tier_bytes.keys() == engines[1].stats.tier_bytes.keys() == {"exact", "int8"}
    other = Policy(name="other", precision=replace(INT8.precision or Precision(), exact_layers=(0,)))
    with pytest.raises(InvalidConfigError, match="is not the same in all policies"):
        tiny_engine().sharing([INT8, other])


def test_closed_ranks_leave_no_gap_and_gapped_ones_do() -> None:
    said = conversation(8)
    for policy in (CLOSED, NARROW):
        engine = tiny_engine(policy=policy)
        score, _ = score_all(engine, said, TOOLS)
        session = engine.session(score.session_id)
        has_gap = session.view.next_position > session.view.num_tokens
        assert has_gap == (policy is NARROW)
