"""The engine: takes whole histories, computes what is new, and keeps every session inside one budget."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from torch import Tensor

from turnkv.cache import KVMemory, TierPlan
from turnkv.cache.storage import can_store
from turnkv.config import CacheConfig, EngineConfig, SamplingParams
from turnkv.conversation.messages import Message, parse_messages
from turnkv.conversation.rendering import Renderer
from turnkv.conversation.tools import parse_tools
from turnkv.conversation.turns import Turn, group_turns, head_length
from turnkv.engine.admission import admit
from turnkv.engine.dryrun import DryRunner
from turnkv.engine.grammar import Grammars
from turnkv.engine.journal import Event
from turnkv.engine.request import Generation, Reply, Request, Score, Scoring
from turnkv.engine.restore import restore
from turnkv.engine.retention import Limits, closed_turns, droppable_records, is_pinned
from turnkv.engine.runner import Chunk, ModelRunner
from turnkv.engine.sampler import Sampler
from turnkv.engine.session import Session
from turnkv.engine.settling import Settler
from turnkv.engine.stats import CacheStats
from turnkv.engine.table import SessionTable
from turnkv.errors import InvalidConfigError, InvalidMessagesError, OutOfPagesError, TurnKVError, UnknownTurnError
from turnkv.models import resolve_model
from turnkv.policy import FULL, Policy
from turnkv.types import EXACT, Role, SessionId

MAX_GAP_PAGES = 4
"""Pages that a session may waste by gaps before they are closed."""


class Engine:
    """Runs one model over many sessions. Single-threaded: one caller at a time."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        *,
        name: str,
        policy: Policy = FULL,
        cache: CacheConfig | KVMemory | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        """Set up an empty cache for a loaded model, or share another engine's; see `Engine.load` for the short way."""
        self.runner = runner
        self.name = name
        self.policy = policy
        self.config = config or EngineConfig()
        self._tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, generation_eos_ids=_eos_ids(runner.model))
        self._memory = cache if isinstance(cache, KVMemory) else _memory(runner, (policy,), cache or CacheConfig())
        self._settler = Settler(policy, self.renderer, self._memory)
        self._table = SessionTable(self._memory, runner.max_positions)
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._is_room_freed = True

    @staticmethod
    def load(  # noqa: PLR0913 - the parts of an engine, each with its default
        model: str | None = None,
        *,
        policy: Policy = FULL,
        dtype: str = "bfloat16",
        cache: CacheConfig | None = None,
        config: EngineConfig | None = None,
        is_dry: bool = False,
        progress: Callable[[str], None] = lambda line: None,
    ) -> "Engine":
        """Find, load and probe a model.

        Args:
            model: a folder, a .gguf file, a hub name, or None for the default model.
            policy: what becomes of closed turns.
            dtype: of weights and exact KV.
            cache: the KV budget.
            config: how to compute.
            is_dry: compute nothing and read no weights; only the account of turns, tokens and bytes is right.
            progress: called with a line for each step of work that preparing the model takes.

        Raises:
            ModelFilesError: the model cannot be found, fetched or read.
            UnsupportedModelError: it is of a kind that is refused.
        """
        folder = resolve_model(model, progress=progress)
        config = config or EngineConfig()
        kind = DryRunner if is_dry else ModelRunner
        runner, tokenizer = kind.load(folder.path, dtype=dtype, attention=config.attention, weights=config.weights)
        return Engine(runner, tokenizer, name=folder.name, policy=policy, cache=cache, config=config)

    def with_policy(self, policy: Policy, *, cache: CacheConfig | None = None) -> "Engine":
        """Another engine with the same weights and an empty cache of its own, as large unless `cache` is given."""
        cache = cache or CacheConfig(budget_bytes=self._memory.budget.total_bytes)
        return Engine(self.runner, self._tokenizer, name=self.name, policy=policy, cache=cache, config=self.config)

    def sharing(self, policies: Sequence[Policy], *, cache: CacheConfig | None = None) -> list["Engine"]:
        """Engines with the same weights and one new memory between them, one a policy: see `adopt`.

        Raises:
            InvalidConfigError: the policies keep different layers exact.
        """
        memory = _memory(self.runner, policies, cache or CacheConfig(budget_bytes=self._memory.budget.total_bytes))
        memory.is_shared = True
        return [
            Engine(self.runner, self._tokenizer, name=self.name, policy=policy, cache=memory, config=self.config)
            for policy in policies
        ]

    # -- requests ------------------------------------------------------------------------------------------------

    def respond(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        sampling: SamplingParams | None = None,
        session_id: SessionId | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Write the next assistant message of a conversation given whole, computing only what is new of it.

        Raises:
            InvalidMessagesError: the conversation is malformed.
            OutOfPositionsError, OverBudgetError: it cannot be held; nothing has changed.
        """
        request = self.generation(messages, tools, sampling=sampling, session_id=session_id, on_text=on_text)
        self.submit(request)
        self._finish(request)
        self.tidy()
        return self.reply(request)

    def score(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        session_id: SessionId | None = None,
        observe: Callable[[Tensor], None] | None = None,
    ) -> Score:
        """Measure the likelihood of a conversation's last message, an assistant's, and keep it in the cache.

        Raises: as `respond`.
        """
        request = self.scoring(messages, tools, session_id=session_id, observe=observe)
        self.submit(request)
        self._finish(request)
        self.tidy()
        return self.score_of(request)

    def generation(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        sampling: SamplingParams | None = None,
        session_id: SessionId | None = None,
        on_text: Callable[[str], None] | None = None,
        must_call: bool = False,
    ) -> Generation:
        """A request for `submit` that writes a reply; with `must_call` one that calls tools and nothing else.

        Raises:
            InvalidMessagesError: the conversation is malformed, or a tool's schema cannot be followed.
        """
        sampling = sampling or SamplingParams()
        schemas = parse_tools(tools or ())
        return Generation(
            messages=_with_some_turn(parse_messages(messages)),
            tools=schemas,
            session_id=session_id,
            constraint=self._grammars.calls(schemas) if must_call else None,
            sampler=Sampler(sampling),
            stop_ids=self.renderer.stop_ids,
            decode=self.decode,
            max_new_tokens=sampling.max_new_tokens or self.config.max_new_tokens,
            on_text=on_text,
        )

    def scoring(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        session_id: SessionId | None = None,
        observe: Callable[[Tensor], None] | None = None,
    ) -> Scoring:
        """A request for `submit` that scores the last message."""
        parsed = parse_messages(messages, allow_open_calls=True)
        if parsed[-1].role is not Role.ASSISTANT:
            raise InvalidMessagesError(
                f"is from the {parsed[-1].role}, so there is nothing to score",
                remedy="end the conversation with an assistant message",
                index=len(parsed) - 1,
            )
        schemas = parse_tools(tools or ())
        [rendered] = self.renderer.render(parsed, schemas, start=len(parsed) - 1)
        return Scoring(
            messages=_with_some_turn(parsed[:-1]),
            tools=schemas,
            session_id=session_id,
            observe=observe,
            reply=parsed[-1],
            body=rendered.tokens[rendered.header_tokens :],
            is_measured=not self.runner.is_dry,
        )

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._tokenizer, self.runner.model.config.get_text_config().vocab_size)

    def submit(self, request: Request) -> None:
        """Admit a request, or let it wait until others have made room.

        Raises:
            OutOfPositionsError, OverBudgetError: it cannot be held even alone; nothing has changed.
            UnknownSessionError: it names a session that the engine does not hold.
        """
        if self._waiting or not self._admit(request):
            self._waiting.append(request)

    def step(self) -> None:
        """Compute one forward pass: all decode tokens, then prefill chunks, oldest request first.

        What goes wrong with one request alone, its own callbacks included, becomes that request's `error`. If the
        pass itself is interrupted, every request in it is taken back and the interruption goes on.
        """
        self._admit_waiting()
        room = self.config.max_step_tokens
        batch: list[Request] = []
        chunks: list[Chunk] = []
        try:
            for request in sorted(self._active, key=lambda request: not request.is_decoding):
                if room <= 0:
                    break
                batch.append(request)
                chunks.append(request.next_chunk(room))
                room -= len(chunks[-1].tokens)
            if not batch:
                self.tidy()
                return
            logits = self.runner.run(self._memory.storage, chunks)
            for request, rows in zip(batch, logits, strict=True):
                self._receive(request, rows)
        except BaseException as error:
            for request in batch:
                self.cancel(request, error)
            raise

    def tidy(self) -> None:
        """Do what can wait until nobody waits: settle closed turns, close gaps, give memory back to the system.

        What is not done here is done when it must be; answers are the same either way.
        """
        budget = self._memory.budget
        for session in self._table:
            if session.is_busy:
                continue
            self._settler.settle(session, lambda num_bytes: budget.free_bytes >= num_bytes)
            if session.num_gap_pages > MAX_GAP_PAGES:
                with suppress(OutOfPagesError):
                    session.repack()
        self._memory.give_back()

    def cancel(self, request: Request, error: BaseException | None = None) -> None:
        """Take a request back: its session is as it was before, save for turns dropped. A finished one stays."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._active:
            self._active.remove(request)
            self._table.take_back(request)
        else:
            return
        self._is_room_freed = True
        request.error = error or TurnKVError("the request was cancelled; make a new one to ask again")
        request.is_done = True

    def reply(self, request: Generation) -> Reply:
        """The result of a finished generation.

        Raises: what ended it, if it was not answered.
        """
        result = _result(request)
        assert isinstance(result, Reply)
        return result

    def score_of(self, request: Scoring) -> Score:
        """The result of a finished scoring.

        Raises: what ended it, if it was not answered.
        """
        result = _result(request)
        assert isinstance(result, Score)
        return result

    # -- sessions ------------------------------------------------------------------------------------------------

    def session(self, session_id: SessionId) -> Session:
        """The session of this id.

        Raises:
            UnknownSessionError: the engine holds none; it was closed, or given up for want of room.
        """
        return self._table.get(session_id)

    def adopt(self, session: Session, num_messages: int) -> Session:
        """Fork the first messages of a session, which an engine that shares this one's memory holds.

        Nothing is computed or copied. This engine's policy acts on the fork from its first request on.
        """
        own = self._table.create()
        own.fork_from(session, num_messages + 1)
        own.is_due = True
        self._table.touch(own)
        return own

    def drop(self, session_id: SessionId, turn: int) -> int:
        """Drop a closed turn by hand; gives the tokens gone.

        Raises:
            UnknownTurnError: there is no such turn, it is open or pinned, or the session is just being answered.
        """
        session = self.session(session_id)
        closed = self._closed_turn(session, turn, "dropped")
        self._is_room_freed = True
        return session.drop(turn, droppable_records(session, closed), "asked")

    def forget(self, session_id: SessionId, turn: int) -> int:
        """Drop a closed turn and all that was computed after it, so that no trace of it is left; gives the tokens gone.

        The next request computes again what followed, as if the turn had never been. Other sessions that share the
        turn keep it.

        Raises: as `drop`.
        """
        session = self.session(session_id)
        closed = self._closed_turn(session, turn, "forgotten")
        self._is_room_freed = True
        return session.forget(turn, closed.start + 1, droppable_records(session, closed, is_gone_too=True))

    def _closed_turn(self, session: Session, turn: int, what: str) -> Turn:
        """A turn that may go."""
        if session.is_busy:
            raise UnknownTurnError(f"turn {turn} cannot be {what} while the session is answered; wait, or cancel")
        closed = {each.index: each for each in closed_turns(session.messages)}
        if turn not in closed or is_pinned(session, self.policy, closed[turn], session.messages):
            held = f"0 to {max(closed)}" if closed else "there is none yet"
            raise UnknownTurnError(f"turn {turn} cannot be {what}; name a closed turn ({held}) that is not pinned")
        return closed[turn]

    def pin(self, session_id: SessionId, turn: int, *, is_pinned: bool = True) -> None:
        """Spare a turn from drops from now on, or no more.

        Raises:
            UnknownTurnError: there is no such turn.
        """
        session = self.session(session_id)
        if not 0 <= turn < len(group_turns(session.messages)):
            raise UnknownTurnError(f"turn {turn} cannot be pinned; the session has no such turn")
        session.pin(turn, is_pinned)

    def close_session(self, session_id: SessionId) -> None:
        """Forget a session and free what only it holds. A request that is computed for it is cancelled."""
        session = self.session(session_id)
        for request in [request for request in self._active if request.session is session]:
            self.cancel(request)
        if session in self._table:  # one that its request had opened went with it
            self._table.close(session_id)
        self._is_room_freed = True

    def clear(self) -> None:
        """Forget all sessions; requests still being computed are cancelled."""
        for session in tuple(self._table):
            if session in self._table:
                self.close_session(session.id)

    def restore(self, events: Sequence[Event]) -> Session:
        """Make a session's view again from its journal, by the same steps, and hold it under the same id.

        Gives the same segments at the same offsets, bit for bit where the same machine computes them alone. Messages
        are not in a journal, so no request continues the session.

        Raises:
            InvalidFileError: the journal is damaged, belongs to another model, or its session is held already.
            OverBudgetError: its view does not fit.
        """
        return restore(events, self._table, self.runner, self._memory.storage, self.name)

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token as it is computed, over all layers."""
        return self._memory.token_bytes()

    @property
    def stats(self) -> CacheStats:
        """The account of the KV memory now."""
        memory = self._memory
        return CacheStats(
            budget_bytes=memory.budget.total_bytes,
            held_bytes=memory.budget.held_bytes,
            committed_bytes=memory.budget.touched_bytes,
            live_bytes=memory.live_bytes,
            peak_held_bytes=self._table.peak_bytes,
            tier_bytes={
                str(tier): pool.num_used_slots * memory.token_bytes(tier) for tier, pool in memory.pools.items()
            },
            free_runs={str(tier): pool.num_free_runs for tier, pool in memory.pools.items()},
            num_sessions=len(self._table),
            num_given_up=self._table.num_given_up,
            num_segments=len(memory.store),
            num_parts=memory.store.num_parts,
            num_runs=memory.store.num_runs,
        )

    def check(self) -> None:
        """Assert what always holds, in pool, segments and sessions."""
        self._memory.check()
        self._table.check()

    def _admit(self, request: Request) -> bool:
        """Give the request a session and room; False if others must finish first."""
        if not admit(request, self.policy, self._table, self.renderer, self._settler, self._limits, self.name):
            assert self._active, "a request that can be held alone is admitted when it is alone"
            return False
        self._active.append(request)
        return True

    def _admit_waiting(self) -> None:
        """Admit those that wait, first come first served; looked at only when something has made room."""
        while self._waiting and self._is_room_freed:
            request = self._waiting[0]
            try:
                self._is_room_freed = self._admit(request)
            except Exception as error:
                self.cancel(request, error)
            else:
                if self._is_room_freed:
                    self._waiting.popleft()

    @property
    def _limits(self) -> Limits:
        return Limits(
            max_bytes=self._memory.budget.total_bytes,
            max_positions=self.runner.max_positions,
            token_bytes=self._memory.token_bytes(),
            can_shift=self.runner.can_shift,
        )

    def _finish(self, request: Request) -> None:
        try:
            while not request.is_done:
                self.step()
        except BaseException:
            self.cancel(request)
            raise

    def _receive(self, request: Request, logits: Tensor) -> None:
        """Hand a request its logits, and retire it if they were its last."""
        try:
            request.receive(logits)
            if request.is_done and request in self._active:
                self._retire(request)
        except Exception as error:  # a callback may raise anything; it is raised again where the result is asked for
            self.cancel(request, error)

    def _retire(self, request: Request) -> None:
        """Record the reply and give back the room it did not need."""
        session = request.session
        assert session is not None
        record = session.records[request.reply_record]
        if isinstance(request, Scoring):
            record.message = request.reply
        elif isinstance(request, Generation):
            record.tokens.extend(self.renderer.end_tokens)
            content, calls, reasoning = self.renderer.parse_reply(request.text)
            record.message = Message(Role.ASSISTANT, content, calls, reasoning=reasoning)
        session.seal()
        session.writer.trim()
        session.is_busy = False
        assert record.message is not None
        request.conclude(record.message)
        session.is_due = True
        self._active.remove(request)
        self._is_room_freed = True

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        # Cleaning up spaces would take back text that was sent already.
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _memory(runner: ModelRunner, policies: Sequence[Policy], cache: CacheConfig) -> KVMemory:
    """Memory for all tiers that policies may use."""
    precisions = [policy.precision for policy in policies if policy.precision is not None]
    exact_layers = frozenset(precisions[0].exact_layers if precisions else ())
    if any(frozenset(precision.exact_layers) != exact_layers for precision in precisions):
        raise InvalidConfigError(
            "precision.exact_layers",
            sorted(exact_layers),
            "is not the same in all policies that share a memory",
            remedy="give each policy a memory of its own",
        )
    if exact_layers and max(exact_layers) >= len(runner.shapes):
        raise InvalidConfigError(
            "precision.exact_layers",
            max(exact_layers),
            f"is no layer: the model has {len(runner.shapes)}",
            remedy=f"count from 0 to {len(runner.shapes) - 1}",
        )
    tiers = tuple(dict.fromkeys([EXACT, *(tier for precision in precisions for tier in precision.tiers)]))
    for tier in tiers:
        if not can_store(tier, runner.shapes, runner.dtype):
            raise InvalidConfigError(
                "precision", str(tier), "cannot store this model's heads", remedy="choose int8, or leave keys exact"
            )
    plans = {tier: TierPlan.of(tier, runner.shapes, runner.dtype, exact_layers) for tier in tiers}
    num_pages = KVMemory.num_pages(plans, cache.budget_bytes)
    return KVMemory(plans, num_pages[EXACT] * plans[EXACT].page_bytes, runner.new_storage(plans, num_pages))


def _eos_ids(model: Any) -> list[int]:
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return [eos] if isinstance(eos, int) else list(eos or ())


def _result(request: Request) -> Reply | Score:
    assert request.is_done, "run steps until it is"
    if request.error is not None:
        raise request.error
    assert request.result is not None
    return request.result


def _with_some_turn(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Refuse a conversation without anything to answer."""
    if head_length(messages) == len(messages):
        raise InvalidMessagesError("holds only system text", remedy="add a user message to answer")
    return messages
