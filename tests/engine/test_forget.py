import pytest
import torch
from tests.engine.conversations import TOOLS, conversation, score_all, tiny_engine

from turnkv.conversation.turns import group_turns
from turnkv.engine.journal import Drop
from turnkv.errors import UnknownTurnError
from turnkv.policy import FULL, Keep, Policy, Window

NARROW = Policy(name="narrow", window=Window(high=4, low=2), keep=Keep(recent=0))


def test_after_forgetting_logits_equal_a_session_that_never_held_the_turn() -> None:
    said = conversation(6, with_tools=False)
    engine, fresh = tiny_engine(), tiny_engine()
    score, _ = score_all(engine, said[:-2])
    assert engine.forget(score.session_id, 2) > 0
    rows: list[torch.Tensor] = []
    engine.score(said, session_id=score.session_id, observe=lambda logits: rows.append(logits.clone()))
    engine.check()
    wanted: list[torch.Tensor] = []
    without = said[:5] + said[7:]
    fresh.score(without, observe=lambda logits: wanted.append(logits.clone()))
    torch.testing.assert_close(torch.cat(rows), torch.cat(wanted), atol=1e-4, rtol=0)


def test_a_drop_leaves_a_trace_that_forgetting_does_not() -> None:
    said = conversation(6, with_tools=False)
    rows: dict[str, list[torch.Tensor]] = {"drop": [], "forget": []}
    for name, found in rows.items():
        engine = tiny_engine()
        score, _ = score_all(engine, said[:-2])
        getattr(engine, name)(score.session_id, 2)
        engine.score(said, session_id=score.session_id, observe=lambda logits, f=found: f.append(logits.clone()))  # type: ignore[misc]
    assert not torch.allclose(torch.cat(rows["drop"]), torch.cat(rows["forget"]), atol=1e-4)


def test_only_what_follows_is_computed_again_and_other_sessions_keep_the_turn() -> None:
    said = conversation(5)
    engine = tiny_engine()
    score, _ = score_all(engine, said[:-2], TOOLS)
    other = [*said[:-3], {"role": "user", "content": "Other?"}, {"role": "assistant", "content": "No."}]
    fork = engine.score(other, TOOLS)
    assert fork.session_id != score.session_id
    held = engine.session(fork.session_id).num_held_tokens
    records = engine.session(score.session_id).records
    engine.forget(score.session_id, 1)
    gone = [record for record in records if record.is_dropped]
    after = engine.score(said, TOOLS, session_id=score.session_id)
    engine.check()
    assert after.usage.dropped_tokens == sum(len(record.tokens) for record in gone)
    first = records.index(gone[0])
    assert after.usage.cached_tokens == sum(len(record.tokens) for record in records[:first])
    assert engine.session(fork.session_id).num_held_tokens == held


def test_what_was_dropped_later_stays_dropped_and_the_journal_makes_the_view_again() -> None:
    said = conversation(9)
    engine = tiny_engine(policy=NARROW)
    score, _ = score_all(engine, said[:-2], TOOLS)
    session = engine.session(score.session_id)
    dropped = {index for index, record in enumerate(session.records) if record.is_dropped}
    turn = next(event for event in reversed(session.journal) if isinstance(event, Drop)).turn
    engine.forget(score.session_id, 0)
    assert dropped <= {index for index, record in enumerate(session.records) if record.is_dropped}
    assert turn >= 0
    engine.score(said, TOOLS, session_id=score.session_id)
    engine.check()
    other = tiny_engine(policy=NARROW)
    again = other.restore(session.journal)
    assert [(e.segment.key, e.offset) for e in again.view.entries] == [
        (e.segment.key, e.offset) for e in session.view.entries
    ]


def test_an_open_or_pinned_turn_cannot_be_forgotten() -> None:
    engine = tiny_engine(policy=FULL)
    score, _ = score_all(engine, conversation(3))
    engine.pin(score.session_id, 1)
    for turn in (1, len(group_turns(engine.session(score.session_id).messages)) - 1, 7):
        with pytest.raises(UnknownTurnError, match=f"turn {turn} cannot be forgotten"):
            engine.forget(score.session_id, turn)
