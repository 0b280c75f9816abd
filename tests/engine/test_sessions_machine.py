"""A client that does what clients do, in any order, against an engine that is short of everything."""

from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine.conversations import TOOLS, call, result, tiny_engine

from turnkv.config import SamplingParams
from turnkv.engine import Engine
from turnkv.errors import OutOfPositionsError, OverBudgetError, UnknownTurnError
from turnkv.policy import Keep, Old, Policy, Precision, Window
from turnkv.types import Tier

TOKEN = 1024
POLICIES = (
    Policy(name="full"),
    Policy(name="narrow", window=Window(high=2, low=1), keep=Keep(recent=0)),
    Policy(name="clear", window=Window(high=3, low=1), keep=Keep(recent=1, tool_results="clear")),
    Policy(
        name="lean",
        window=Window(high=3, low=1),
        keep=Keep(recent=0),
        precision=Precision(exact=("number",), old=Old(after=1, store=Tier("int4", "int4"))),
    ),
    Policy(name="refuse", window=Window(high=4, low=2, overflow="refuse", budget_bytes=250 * TOKEN)),
)
TEXTS = st.sampled_from(["Hi.", "What is it?", "Tell me more of this.", "x" * 60])


class Clients(RuleBasedStateMachine):
    engine: Engine
    conversations: list[tuple[list[dict[str, Any]], str | None]]

    @initialize(
        policy=st.sampled_from(POLICIES), pages=st.sampled_from([18, 30]), positions=st.sampled_from([160, 256, 4096])
    )
    def start(self, policy: Policy, pages: int, positions: int) -> None:
        self.engine = tiny_engine(policy=policy, budget_bytes=pages * 16 * TOKEN, step=64, max_positions=positions)
        self.conversations = []

    def ask(self, messages: list[dict[str, Any]], old: int | None = None, *, cancel_after: int | None = None) -> None:
        request = self.engine.generation(messages, TOOLS[:0], sampling=SamplingParams(max_new_tokens=4))
        before = self.snapshot()
        try:
            self.engine.submit(request)
        except (OverBudgetError, OutOfPositionsError):
            assert self.snapshot() == before
            if old is not None:
                del self.conversations[old]
            return
        steps = 0
        while not request.is_done:
            if cancel_after is not None and steps >= cancel_after:
                self.engine.cancel(request)
                return
            self.engine.step()
            self.engine.check()
            steps += 1
        reply = self.engine.reply(request)
        usage = reply.usage
        assert usage.prompt_tokens == usage.cached_tokens + usage.computed_tokens + usage.dropped_tokens
        session = self.engine.session(reply.session_id)
        if self.engine.policy.precision is None:
            assert usage.kv_bytes == session.num_held_tokens * TOKEN
        users = [record for record in session.records if record.message and record.message.role == "user"]
        assert not users[-1].is_dropped
        entry = ([*messages, reply.message.to_openai()], reply.session_id)
        if old is None:
            self.conversations.append(entry)
        else:
            self.conversations[old] = entry

    def snapshot(self) -> dict[str, Any]:
        return {s.id: (s.view.hash, len(s.records), len(s.journal), s.is_busy) for s in self.engine._table}

    @rule(text=TEXTS)
    def begin(self, text: str) -> None:
        self.ask([{"role": "user", "content": text}])

    @precondition(lambda self: self.conversations)
    @rule(data=st.data(), text=TEXTS, cancel_after=st.sampled_from([None, None, 0, 1, 3]))
    def extend(self, data: st.DataObject, text: str, cancel_after: int | None) -> None:
        at = data.draw(st.integers(0, len(self.conversations) - 1))
        self.ask([*self.conversations[at][0], {"role": "user", "content": text}], at, cancel_after=cancel_after)

    @precondition(lambda self: self.conversations)
    @rule(data=st.data(), text=TEXTS)
    def use_a_tool(self, data: st.DataObject, text: str) -> None:
        at = data.draw(st.integers(0, len(self.conversations) - 1))
        history = self.conversations[at][0]
        self.ask([*history, {"role": "user", "content": "Look."}, call(1), result(1, text)], at)

    @precondition(lambda self: self.conversations)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.conversations) - 1))
        self.ask(self.conversations[at][0][:-1], at)

    @precondition(lambda self: self.conversations)
    @rule(data=st.data(), text=TEXTS)
    def edit(self, data: st.DataObject, text: str) -> None:
        at = data.draw(st.integers(0, len(self.conversations) - 1))
        history = list(self.conversations[at][0])[:-1]
        users = [index for index, message in enumerate(history) if message["role"] == "user"]
        place = data.draw(st.sampled_from(users))
        history[place] = {"role": "user", "content": text + "!"}
        self.ask(history, at if data.draw(st.booleans()) else None)

    @precondition(lambda self: self.conversations)
    @rule(data=st.data(), turn=st.integers(0, 3), what=st.sampled_from(["drop", "pin", "unpin", "close"]))
    def by_hand(self, data: st.DataObject, turn: int, what: str) -> None:
        held = sorted(session.id for session in self.engine._table)
        if not held:
            return
        session_id = data.draw(st.sampled_from(held))
        if what == "close":
            self.engine.close_session(session_id)
            return
        live = self.engine.stats.live_bytes
        try:
            if what == "drop":
                self.engine.drop(session_id, turn)
                assert self.engine.stats.live_bytes <= live
            else:
                self.engine.pin(session_id, turn, is_pinned=what == "pin")
        except UnknownTurnError:
            assert self.engine.stats.live_bytes == live

    @invariant()
    def memory_is_exact_and_nothing_is_busy(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        stats = self.engine.stats
        segments = {segment for session in self.engine._table for segment in session.view.segments}
        assert stats.live_bytes == sum(map(self.engine._memory.segment_bytes, segments))
        if self.engine.policy.precision is None:
            assert stats.live_bytes == sum(len(segment) for segment in segments) * TOKEN
        assert stats.live_bytes <= stats.held_bytes <= stats.peak_held_bytes <= stats.budget_bytes
        assert not any(session.is_busy for session in self.engine._table)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        fullest = max(self.engine._table, key=lambda session: len(session.journal), default=None)
        if fullest is not None:
            other = tiny_engine(policy=self.engine.policy, max_positions=self.engine.runner.max_positions)
            again = other.restore(fullest.journal)
            assert again.view.hash == fullest.view.hash
            assert again.journal == fullest.journal
        self.engine.tidy()
        self.engine.check()
        for session in list(self.engine._table):
            self.engine.close_session(session.id)
        self.engine.check()
        assert self.engine.stats.held_bytes == self.engine.stats.num_segments == 0


Clients.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=14,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # shrinking runs models for minutes; add Phase.shrink to look into a failure
)


TestClients = Clients.TestCase
