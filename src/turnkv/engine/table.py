"""The session table: which conversations are held, and which is given up when another needs room."""

from collections.abc import Iterator
from itertools import count

from turnkv.cache import PagePool, SegmentStore
from turnkv.config import PAGE_TOKENS
from turnkv.engine.request import Request
from turnkv.engine.retention import Plan
from turnkv.engine.session import Session
from turnkv.errors import UnknownSessionError
from turnkv.types import SessionId


class SessionTable:
    """Holds sessions by id. Idle ones are given up, least recently used first, when room is short."""

    def __init__(self, pool: PagePool, store: SegmentStore, max_positions: int | None) -> None:
        self._pool = pool
        self._store = store
        self._max_positions = max_positions
        self._sessions: dict[SessionId, Session] = {}
        self._ids = count(1)
        self._clock = count(1)
        self.num_given_up = 0
        self.peak_pages = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def __contains__(self, session: Session) -> bool:
        return self._sessions.get(session.id) is session

    def get(self, session_id: SessionId) -> Session:
        """The session of this id.

        Raises:
            UnknownSessionError: none is held.
        """
        if session_id not in self._sessions:
            raise UnknownSessionError(f"session {session_id!r} is not held; send the whole history without an id")
        return self._sessions[session_id]

    def create(self, session_id: SessionId | None = None) -> Session:
        """An empty session."""
        name = session_id or next(name for n in self._ids if (name := SessionId(f"s{n}")) not in self._sessions)
        assert name not in self._sessions
        session = Session(name, self._store, self._pool, self._max_positions)
        self._sessions[name] = session
        return session

    def close(self, session_id: SessionId) -> None:
        """Forget a session; what only it holds is freed."""
        self.get(session_id).close()
        del self._sessions[session_id]

    def touch(self, session: Session) -> None:
        """Count a session as used now."""
        session.last_used = next(self._clock)

    def reserve(self, session: Session, num_tokens: int) -> bool:
        """Reserve slots behind a session, giving up idle ones where it must.

        False if even that would not be enough; then none is given up.
        """
        if self._pool.num_free_pages < session.writer.num_pages_needed(num_tokens):
            session.writer.close()  # the rest of its last page may be all that is left of that page
            needed = session.writer.num_pages_needed(num_tokens)
            busy = [other for other in self if other.is_busy]
            kept = {page for other in busy for page in other.pages() | other.writer.pages}
            if self._pool.num_pages - len(kept) < needed:
                return False
            for other in sorted((other for other in self if not other.is_busy), key=lambda other: other.last_used):
                if self._pool.num_free_pages >= needed:
                    break
                self.close(other.id)
                self.num_given_up += 1
        session.writer.reserve(num_tokens)
        self.peak_pages = max(self.peak_pages, self._pool.num_held_pages)
        return True

    def can_hold(self, session: Session, plan: Plan, reply_tokens: int) -> bool:
        """Whether a session would have room for a plan if it were alone; a page with a hole counts whole."""
        gone = [index for drop in plan.drops for index in drop.records]
        num_new = -(-(plan.new_tokens + reply_tokens) // PAGE_TOKENS)
        return len(session.pages(without=gone)) + num_new <= self._pool.num_pages

    def take_back(self, request: Request) -> None:
        """Undo what a request did to its session, save for turns dropped."""
        session = request.session
        if session is None:
            return
        session.abandon()
        session.truncate(request.num_records_before)
        session.is_busy = False
        request.session = None
        request.admission = None
        if not request.num_records_before:
            self.close(session.id)

    def check(self) -> None:
        """Assert what holds of each session and of all together."""
        owners: dict[int, int] = {}
        for session in self:
            session.check()
            for segment in session.view.segments:
                owners[id(segment)] = owners.get(id(segment), 0) + 1
        for session in self:
            for segment in session.view.segments:
                assert segment.owners == owners[id(segment)]
        assert len(owners) == len(self._store)
