"""The account of real sessions under real policies, by dry runs with the default model's sizes and tokenizer."""

from itertools import pairwise

import pytest
from tests.shared_data import REPOSITORY, shared_file

from turnkv.engine import Engine
from turnkv.evaluate.replay import replay_session
from turnkv.evaluate.sessions import RecordedSession, load_sessions, read_ids
from turnkv.policy import FULL, load_policy

pytestmark = [pytest.mark.default_model, pytest.mark.shared_data]


@pytest.fixture(scope="module")
def dozen() -> list[RecordedSession]:
    return load_sessions(shared_file("agent_sessions.jsonl"), ids=read_ids(REPOSITORY / "benchmarks" / "sessions.txt"))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(is_dry=True, policy=load_policy("window"))


def test_a_window_finishes_every_session_of_the_dozen_and_accounts_for_every_token(
    dozen: list[RecordedSession], engine: Engine
) -> None:
    assert len(dozen) == 12
    for session in dozen:
        result = replay_session(engine, session)
        engine.check()
        assert result.error is None, session.id
        for turn in result.turns:
            assert turn.prompt_tokens == turn.cached_tokens + turn.computed_tokens + turn.dropped_tokens
            assert turn.kv_bytes <= engine.stats.budget_bytes
        for before, after in pairwise(result.turns):
            assert after.prompt_tokens == before.prompt_tokens + before.scored_tokens + after.computed_tokens
        run = sum(turn.computed_tokens + turn.scored_tokens for turn in result.turns)
        assert run == result.turns[-1].prompt_tokens + result.turns[-1].scored_tokens
    assert engine.stats.peak_held_bytes <= engine.stats.budget_bytes
    assert engine.stats.held_bytes == 0, "sessions that ended hold nothing"


def test_under_full_a_session_that_outruns_the_model_says_at_which_turn_and_what_to_do(
    dozen: list[RecordedSession], engine: Engine
) -> None:
    [long] = [session for session in dozen if session.id.startswith("mswe-gemini3-pytest")]
    result = replay_session(engine.with_policy(FULL), long)
    assert result.error is not None
    assert result.error.startswith(f"turn {result.turns[-1].turn + 1}: ")
    assert "8,192" in result.error
    assert '"window"' in result.error
