"""The protocol `oneshot`: the history is prefilled once, a cache is made of it once, and the rest is scored with that.

All caches, questions and candidates share the one prefill. The reference takes the same way through the same engine.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from turnkv.config import SamplingParams
from turnkv.conversation.messages import parse_messages
from turnkv.conversation.spans import Classifier
from turnkv.conversation.turns import group_turns, head_length
from turnkv.engine import Engine, Scoring, Session
from turnkv.errors import OutOfPositionsError, OverBudgetError
from turnkv.evaluate.items import Item, Messages
from turnkv.evaluate.scoring import Pair, Reply, Scored, closeness, reply_of, score_of

if TYPE_CHECKING:
    from turnkv.evaluate.foreign import ForeignCache, Held

AT_ONCE = 8
"""Candidates that are computed in one step."""
MAX_CALL_TOKENS = 160
"""Of a call that is generated."""


@dataclass(frozen=True, slots=True)
class Tail:
    """A continuation as tokens, behind all that comes before its first reply."""

    tokens: tuple[int, ...]
    replies: tuple[tuple[int, Reply], ...]
    """Each reply, and the index in `tokens` at which it begins."""


class Holding(Protocol):
    """A history in a cache."""

    kv_bytes: int
    ttft_s: float | None
    """Seconds to the first token of what is asked, right after the cache was made; None if not measured."""

    def score(self, item: Item, tails: Sequence[Tail]) -> list[list[Scored]]:
        """Score each continuation as if it were the only one."""
        ...

    def is_held(self, message: int) -> bool:
        """Whether a message of the history can still be attended to."""
        ...

    def close(self) -> None:
        """Give back its memory."""
        ...


class Subject(Protocol):
    """Something that makes a cache of a prefilled history."""

    name: str

    def hold(self, base: Session, item: Item) -> Holding:
        """Make it; `base` holds the history in full."""
        ...


class Ours:
    """A policy of turnkv. It acts when the question arrives, as it does in use, and then no more."""

    def __init__(self, engine: Engine, full: Engine) -> None:
        self.name = engine.policy.name
        self._engine = engine
        self._full = full

    def hold(self, base: Session, item: Item) -> "OursHolding":  # noqa: D102 - the protocol says it
        own = self._engine.adopt(base, _num_records(item.history))
        asked = (*item.history, *item.continuations[0])[: item.num_asked + 1]
        request = self._engine.scoring(asked, item.tools, session_id=own.id)
        # Not `score`, which would also settle the turns that the reply closes, and they are open where it is asked for.
        self._engine.submit(request)
        while not request.is_done:
            self._engine.step()
        score = self._engine.score_of(request)
        return OursHolding(self._engine, self._full, own, score.usage.kv_bytes, score.usage.ttft_s)


@dataclass(slots=True)
class OursHolding:
    """A session in which a policy has acted."""

    engine: Engine
    full: Engine
    session: Session
    kv_bytes: int
    ttft_s: float | None

    def score(self, item: Item, tails: Sequence[Tail]) -> list[list[Scored]]:  # noqa: D102 - the protocol says it
        return [run for run, _ in score_all(self.full, self.session, item)]

    def is_held(self, message: int) -> bool:  # noqa: D102 - the protocol says it
        return not self.session.records[message + 1].is_dropped

    def close(self) -> None:  # noqa: D102 - the protocol says it
        self.engine.close_session(self.session.id)

    def answers_rightly(self, item: Item) -> bool:
        """Whether a call that is generated, in a grammar of the tools at hand, is the gold call."""
        asked = (*item.history, *item.continuations[0])[: item.num_asked]
        fork = self.full.adopt(self.session, _num_records(asked))
        try:
            sampling = SamplingParams(max_new_tokens=MAX_CALL_TOKENS)
            request = self.full.generation(asked, item.tools, sampling=sampling, session_id=fork.id, must_call=True)
            self.full.submit(request)
            while not request.is_done:
                self.full.step()
            made = self.full.reply(request).message.to_openai()
        finally:
            self.full.close_session(fork.id)
        return _calls(made) == _calls(item.continuations[0][-1])


class Foreign:
    """Another library's cache, given the same tokens."""

    def __init__(self, cache: "ForeignCache") -> None:
        self.name = cache.name
        self._cache = cache

    def hold(self, base: Session, item: Item) -> "ForeignHolding":  # noqa: D102 - the protocol says it
        records = base.records[: _num_records((*item.history, *item.continuations[0])[: item.num_asked]) + 1]
        return ForeignHolding(self._cache.hold([token for record in records for token in record.tokens]))


class ForeignHolding:
    """A compressed prefix."""

    def __init__(self, held: "Held") -> None:
        self._held = held
        self.kv_bytes = held.kv_bytes
        self.ttft_s: float | None = None

    def score(self, item: Item, tails: Sequence[Tail]) -> list[list[Scored]]:  # noqa: D102 - the protocol says it
        return [self._score(tail) for tail in tails]

    def _score(self, tail: Tail) -> list[Scored]:
        first = tail.replies[0][0]
        logits = self._held.score(tail.tokens, len(tail.tokens) - first)
        return [score_of(reply, logits[at - first : at - first + len(reply.tokens)]) for at, reply in tail.replies]

    def is_held(self, message: int) -> bool:  # noqa: D102 - the protocol says it
        return True

    def close(self) -> None:  # noqa: D102 - the protocol says it
        pass


class Reference:
    """The full cache: holds the last history that it was given, so that items which share one prefill it once."""

    def __init__(self, full: Engine) -> None:
        self._full = full
        self._held: tuple[object, Session] | None = None

    def can_hold(self, item: Item) -> bool:
        """Whether history and right continuation fit together. Computes nothing."""
        request = self._full.scoring((*item.history, *item.continuations[0]), item.tools)
        try:
            self._full.submit(request)
        except (OutOfPositionsError, OverBudgetError):
            return False
        self._full.cancel(request)
        return True

    def base(self, item: Item) -> Session:
        """The history in full, prefilled if it is not the last one's."""
        if self._held is None or self._held[0] != (item.history, item.tools):
            self._full.clear()
            asked = (*item.history, *item.continuations[0])[: item.num_asked + 1]
            score = self._full.score(asked, item.tools)
            self._held = ((item.history, item.tools), self._full.session(score.session_id))
        return self._held[1]

    def tails(self, holding: OursHolding, item: Item) -> tuple[list[list[Scored]], list[Tail]]:
        """Scores of the full cache, and the continuations' tokens for caches that know no messages."""
        found = score_all(self._full, holding.session, item)
        return [run for run, _ in found], [tail for _, tail in found]


def score_all(full: Engine, session: Session, item: Item) -> list[tuple[list[Scored], Tail]]:
    """Score all continuations of an item in forks of a session, with no policy acting on them."""
    found = []
    for start in range(0, len(item.continuations), AT_ONCE):
        found += _score_some(full, session, item, item.continuations[start : start + AT_ONCE])
    return found


def _score_some(
    full: Engine, session: Session, item: Item, continuations: Sequence[Messages]
) -> list[tuple[list[Scored], Tail]]:
    num_asked = _num_records((*item.history, *continuations[0])[: item.num_asked])
    forks = [full.adopt(session, num_asked) for _ in continuations]
    runs: list[list[Scored]] = [[] for _ in continuations]
    ends = [[i + 1 for i, message in enumerate(each) if message["role"] == "assistant"] for each in continuations]
    classifier = Classifier()
    try:
        for step in range(max(map(len, ends))):
            asked = [i for i, each in enumerate(ends) if step < len(each)]
            seen: dict[int, list[Tensor]] = {i: [] for i in asked}
            requests: dict[int, Scoring] = {}
            for i in asked:
                messages = (*item.history, *continuations[i][: ends[i][step]])
                requests[i] = full.scoring(messages, item.tools, session_id=forks[i].id, observe=seen[i].append)
                full.submit(requests[i])
            while not all(request.is_done for request in requests.values()):
                full.step()
            for i, request in requests.items():
                full.score_of(request)
                assert request.session is forks[i], "a fork holds all that comes before"
                runs[i].append(score_of(reply_of(full, forks[i], classifier), torch.cat(seen[i])))
        return [(run, _tail(fork, num_asked, run)) for run, fork in zip(runs, forks, strict=True)]
    finally:
        for fork in forks:
            full.close_session(fork.id)


def _tail(fork: Session, num_asked: int, run: Sequence[Scored]) -> Tail:
    tokens: list[int] = []
    replies = []
    left = list(run)
    for record in fork.records[num_asked + 1 :]:
        if record.header_tokens and left:
            replies.append((len(tokens) + record.header_tokens, left.pop(0).reply))
        tokens += record.tokens
    return Tail(tuple(tokens), tuple(replies))


def _calls(message: Mapping[str, object]) -> list[str]:
    """A message's calls, in an order of their own."""
    calls: Any = message.get("tool_calls") or ()
    made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    return sorted(json.dumps(call, sort_keys=True) for call in made)


def _num_records(messages: Messages) -> int:
    """Records that messages make, without the head's."""
    return len(messages) - head_length(parse_messages(messages, allow_open_calls=True))


def oneshot_metrics(item: Item, holding: Holding, runs: Sequence[Sequence[Scored]], full: Holding,
                    reference: Sequence[Sequence[Scored]]) -> dict[str, Pair]:  # fmt: skip
    """What one cache did to one item."""
    found: dict[str, Pair] = {"kv_ratio": (holding.kv_bytes, full.kv_bytes)}
    if holding.ttft_s is not None:
        found["ttft_s"] = (holding.ttft_s, 1.0)
    if item.kind == "session":
        return found | closeness(runs[0], reference[0])
    if item.kind == "text":
        near = closeness(runs[0], reference[0])
        return found | {f"text_nll_{item.lang}": near["nll"], "text_kl": near["kl"]}
    likelihoods = [-sum(float(scored.nll.sum()) for scored in run) for run in runs]
    if item.kind == "leakage":
        return found | {"secret_ll": (likelihoods[0], 1.0)}
    best = max(likelihoods[: item.num_right])
    name = {"toolcall": "gold", "recall": "recall", "arithmetic": "arithmetic"}[item.kind]
    found[f"{name}_ll"] = (best, 1.0)
    found[f"{name}_first"] = (float(all(best > other for other in likelihoods[item.num_right :])), 1.0)
    better = sum(other >= best for other in likelihoods[item.num_right :])
    found[f"{name}_rank"] = (1.0 + better, 1.0)
    if item.kind == "recall" and item.evidence:
        num_system = len(item.history) - _num_records(item.history)
        is_held = all(holding.is_held(index - num_system) for index in item.evidence if index >= num_system)
        found[f"recall_ll_{'held' if is_held else 'dropped'}"] = (best, 1.0)
        found[f"recall_ll_{_distance(item)}"] = (best, 1.0)
    return found


def _distance(item: Item) -> str:
    """How far back the evidence lies."""
    messages = parse_messages(item.history, allow_open_calls=True)
    num_system = head_length(messages)
    back = sum(turn.start + num_system > max(item.evidence) for turn in group_turns(messages[num_system:]))
    return "near" if back < 8 else "middle" if back < 24 else "far"
