"""Requests: one conversation on its way through the engine, from its first new token to its last."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, log_softmax, tensor

from turnkv.conversation.messages import Message
from turnkv.conversation.turns import group_turns
from turnkv.engine.grammar import Constraint
from turnkv.engine.journal import Shift
from turnkv.engine.runner import Chunk
from turnkv.engine.sampler import Sampler, TokenLogprob
from turnkv.engine.session import Session
from turnkv.types import SessionId, TurnKind

MAX_SCORED_ROWS = 512
"""Tokens scored in one step at most: their logits are held at once, a vocabulary wide."""

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost. Prompt tokens are cached, computed or dropped, each exactly one of these."""

    turn: int
    """Index of the turn that the reply belongs to."""
    kind: TurnKind
    prompt_tokens: int
    """The whole conversation before the reply, dropped turns included."""
    cached_tokens: int
    """Those whose KV was there."""
    computed_tokens: int
    """Those run for this request."""
    dropped_tokens: int
    """Those whose KV is gone."""
    noted_tokens: int
    """Those that the engine wrote into the open turn itself."""
    reply_tokens: int
    """Tokens sampled, or scored."""
    dropped_turns: tuple[int, ...]
    """Turns dropped, wholly or in part, at this request."""
    settled_turns: tuple[int, ...]
    """Turns that this request was the first to see in the tiers of the policy's `[precision]`, or in other ones."""
    shifts: tuple[str, ...]
    """How positions were made room for, in order: `close_ranks`, `fold`."""
    kv_bytes: int
    """KV bytes of the session's view when the request ended; no moment of the request held more."""
    ttft_s: float
    """From submission to the first token's choice, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A generated assistant message."""

    message: Message
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One a token if the sampling parameters ask for them."""
    finish_reason: FinishReason
    usage: Usage
    session_id: SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The likelihood of a recorded assistant message."""

    logprobs: tuple[float, ...]
    """Natural log-probability of each of its tokens, the closing ones included."""
    is_top: tuple[bool, ...]
    """Whether each was the model's first choice."""
    usage: Usage
    session_id: SessionId

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood, nats per token."""
        return -math.fsum(self.logprobs) / len(self.logprobs)


@dataclass(slots=True, kw_only=True)
class Admission:
    """What admission found out, for the usage."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    dropped_tokens: int
    settled_turns: tuple[int, ...]
    num_events: int
    """Journal lines before anything was computed for this request, less its shift of positions."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request(ABC):
    """A conversation being computed. The engine asks it for chunks and hands it logits."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, object], ...]
    session_id: SessionId | None = None
    """Only this session may be continued; None lets the messages decide."""
    observe: Callable[[Tensor], None] | None = None
    """Called with the logits [N, V] that each chosen or scored token came from."""
    started_s: float = field(default_factory=time.perf_counter)
    session: Session | None = None
    admission: Admission | None = None
    num_records_before: int = 0
    dropped_turns: set[int] = field(default_factory=set)
    is_done: bool = False
    """Nothing more will happen to it: it was answered, or `error` says why not."""
    error: BaseException | None = None
    result: Reply | Score | None = None
    """Made when the last token was; what becomes of the session afterwards changes it no more."""
    ttft_s: float | None = None
    _todo: list[tuple[int, int]] = field(default_factory=list)
    _cursor: int = 0

    @property
    @abstractmethod
    def reply_room(self) -> int:
        """Tokens to reserve behind the prompt."""

    def shorten(self, num_tokens: int) -> bool:
        """Do with less room for the reply, if that is possible at all."""
        return False

    @property
    def reply_record(self) -> int:
        """The session's record of the reply."""
        assert self.session is not None
        return len(self.session.records) - 1

    @property
    def is_decoding(self) -> bool:
        """Whether the next step computes a single sampled token."""
        return False

    def start(self, todo: list[tuple[int, int]]) -> None:
        """Begin with the prompt's tokens `(record, token)`."""
        self._todo, self._cursor = todo, 0

    def next_chunk(self, max_tokens: int) -> Chunk:
        """Take the next tokens, at most `max_tokens`, and room for them.

        Where the model's positions end, the view is folded first: always at the same token, whatever the batch.
        """
        session = self.session
        assert session is not None
        count = min(max_tokens, len(self._todo) - self._cursor, self._max_rows())
        if session.max_positions is not None:
            if session.next_position >= session.max_positions:
                session.fold()
            count = min(count, session.max_positions - session.next_position)
        part = self._todo[self._cursor : self._cursor + count]
        self._cursor += count
        position, groups, slots = session.extend(part)
        return Chunk([token for _, token in part], position, groups, slots, self._keep())

    def receive(self, logits: Tensor) -> None:
        """Take the logits of the last chunk's kept tokens, [N, V]."""
        if not len(logits):
            return
        if self.ttft_s is None:
            self._take_first(logits)
            self.ttft_s = time.perf_counter() - self.started_s
        else:
            self._take(logits)

    @property
    def has_more(self) -> bool:
        """Whether tokens are left to compute."""
        return self._cursor < len(self._todo)

    @abstractmethod
    def conclude(self, reply: Message) -> None:
        """Make the result, now that the session's record holds the reply."""

    def _usage(self, reply: Message, num_reply_tokens: int) -> Usage:
        """The account of the finished request."""
        assert self.session is not None
        assert self.admission is not None
        assert self.ttft_s is not None
        facts = self.admission
        turn = group_turns((*self.messages, reply))[-1]
        shifts = tuple(event.reason for event in self.session.journal[facts.num_events :] if isinstance(event, Shift))
        return Usage(
            turn=turn.index,
            kind=turn.kind,
            prompt_tokens=facts.prompt_tokens,
            cached_tokens=facts.cached_tokens,
            computed_tokens=facts.computed_tokens,
            dropped_tokens=facts.dropped_tokens,
            noted_tokens=0,
            reply_tokens=num_reply_tokens,
            dropped_turns=tuple(sorted(self.dropped_turns)),
            settled_turns=facts.settled_turns,
            shifts=shifts,
            kv_bytes=self.session.held_bytes,
            ttft_s=self.ttft_s,
        )

    def _keep(self) -> Literal["none", "last", "all"]:
        return "none" if self.has_more else "last"

    def _max_rows(self) -> int:
        return len(self._todo)

    def _show(self, logits: Tensor) -> None:
        if self.observe is not None:
            self.observe(logits)

    @abstractmethod
    def _take_first(self, logits: Tensor) -> None:
        """Take the logits [1, V] behind the prompt."""

    @abstractmethod
    def _take(self, logits: Tensor) -> None:
        """Take the logits of tokens of the reply."""


@dataclass(slots=True, kw_only=True, eq=False)
class Generation(Request):
    """Writes a reply token by token."""

    sampler: Sampler
    stop_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    max_new_tokens: int
    constraint: Constraint | None = None
    """What the reply may be at all."""
    on_text: Callable[[str], None] | None = None
    """Called with each piece of the reply's text as soon as no stop string can take it back."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = "length"
    num_sent: int = 0
    history: list[int] = field(default_factory=list)
    """Prompt and reply, for the repetition penalty."""

    @property
    def reply_room(self) -> int:
        """The reply at its longest."""
        return self.max_new_tokens

    def shorten(self, num_tokens: int) -> bool:
        """End the reply earlier, by length; it has at least one token."""
        if self.max_new_tokens <= num_tokens:
            return False
        self.max_new_tokens -= max(0, num_tokens)
        return True

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is through."""
        return self.ttft_s is not None

    def conclude(self, reply: Message) -> None:  # noqa: D102 - the base class says it
        assert self.session is not None
        self.result = Reply(
            message=reply,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason="tool_calls" if reply.tool_calls and self.finish_reason == "stop" else self.finish_reason,
            usage=self._usage(reply, len(self.tokens)),
            session_id=self.session.id,
        )

    def _take_first(self, logits: Tensor) -> None:
        self._take(logits)

    def _take(self, logits: Tensor) -> None:
        self._show(logits)
        scores = logits[-1] if self.constraint is None else self.constraint.masked(logits[-1])
        choice = self.sampler.choose(scores, self.history)
        if choice.token in self.stop_ids:
            self._finish("stop")
            return
        if self.constraint is not None:
            self.constraint.accept(choice.token)
        self.tokens.append(choice.token)
        self.history.append(choice.token)
        if self.sampler.params.logprobs is not None:
            self.logprobs.append(choice)
        assert self.session is not None
        self.session.records[self.reply_record].tokens.append(choice.token)
        if self._has_met_stop_string():
            self._finish("stop")
        elif len(self.tokens) >= self.max_new_tokens:
            self._finish("length")
        else:
            self.start([(self.reply_record, choice.token)])
            self._send(hold=max((len(stop) - 1 for stop in self.sampler.params.stop), default=0))

    def _has_met_stop_string(self) -> bool:
        self.text = self.decode(self.tokens)
        cuts = [at for stop in self.sampler.params.stop if (at := self.text.find(stop)) >= 0]
        if cuts:
            self.text = self.text[: min(cuts)]
        return bool(cuts)

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.is_done = True
        self._send(hold=0)

    def _send(self, hold: int) -> None:
        if self.on_text is None:
            return
        stop = len(self.text) - hold
        if not self.is_done and self.text.endswith("\ufffd"):
            stop = min(stop, len(self.text.rstrip("\ufffd")))
        if stop > self.num_sent:
            self.on_text(self.text[self.num_sent : stop])
            self.num_sent = stop


@dataclass(slots=True, kw_only=True, eq=False)
class Scoring(Request):
    """Feeds a recorded reply and measures how likely the model finds it."""

    reply: Message
    body: tuple[int, ...]
    """The reply's tokens behind its generation prompt, closing ones included; never empty."""
    is_measured: bool = True
    """Whether the logits mean anything; a dry run's do not."""
    logprobs: list[float] = field(default_factory=list)
    is_top: list[bool] = field(default_factory=list)

    @property
    def reply_room(self) -> int:
        """The recorded reply."""
        return len(self.body)

    def conclude(self, reply: Message) -> None:  # noqa: D102 - the base class says it
        assert self.session is not None
        self.result = Score(
            logprobs=tuple(self.logprobs),
            is_top=tuple(self.is_top),
            usage=self._usage(reply, len(self.body)),
            session_id=self.session.id,
        )

    def _take_first(self, logits: Tensor) -> None:
        self._measure(logits)
        assert self.session is not None
        self.session.records[self.reply_record].tokens.extend(self.body)
        self.start([(self.reply_record, token) for token in self.body])

    def _take(self, logits: Tensor) -> None:
        self._measure(logits)
        if not self.has_more:
            self.is_done = True

    def _measure(self, logits: Tensor) -> None:
        """Rows predict the body's next tokens; the row behind its last token predicts nothing."""
        targets = self.body[len(self.logprobs) : len(self.logprobs) + len(logits)]
        if not targets:
            return
        if not self.is_measured:
            self.logprobs.extend([math.nan] * len(targets))
            self.is_top.extend([False] * len(targets))
            return
        rows = logits[: len(targets)].float()
        self._show(rows)
        wanted = tensor(targets, device=rows.device)
        chosen = log_softmax(rows, dim=-1).gather(1, wanted[:, None])[:, 0]
        self.logprobs.extend(chosen.tolist())
        self.is_top.extend((rows.argmax(dim=-1) == wanted).tolist())

    def _keep(self) -> Literal["none", "last", "all"]:
        if self.ttft_s is not None:
            return "all"
        return "none" if self.has_more else "last"

    def _max_rows(self) -> int:
        return len(self._todo) if self.ttft_s is None else MAX_SCORED_ROWS
