"""The session table: which conversations are held, and which is given up when another needs room."""

from collections.abc import Iterator
from itertools import count

from turnkv.cache import KVMemory
from turnkv.config import PAGE_TOKENS
from turnkv.engine.request import Request
from turnkv.engine.retention import Plan
from turnkv.engine.session import Session
from turnkv.errors import UnknownSessionError
from turnkv.types import EXACT, SessionId


class SessionTable:
    """Holds sessions by id. Idle ones are given up, least recently used first, when room is short."""

    def __init__(self, memory: KVMemory, max_positions: int | None) -> None:
        self._memory = memory
        self._max_positions = max_positions
        self._sessions: dict[SessionId, Session] = {}
        self._ids = count(1)
        self._clock = count(1)
        self.num_given_up = 0
        self.peak_bytes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def __contains__(self, session: Session) -> bool:
        return self._sessions.get(session.id) is session

    @property
    def is_busy(self) -> bool:
        """Whether any session is being answered."""
        return any(session.is_busy for session in self)

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
        session = Session(name, self._memory, self._max_positions)
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
        page_bytes = self._memory.page_bytes[EXACT]
        if self._memory.budget.free_bytes < session.writer.num_pages_needed(num_tokens) * page_bytes:
            session.writer.close()  # the rest of its last page may be all that is left of that page
            if not self.make_room(session.writer.num_pages_needed(num_tokens) * page_bytes):
                return False
        session.writer.reserve(num_tokens)
        self.peak_bytes = max(self.peak_bytes, self._memory.budget.held_bytes)
        return True

    def make_room(self, num_bytes: int, keep: Session | None = None) -> bool:
        """Give up idle sessions but `keep`, least recently used first, until so many bytes are free.

        False if even that would not be enough; then none is given up.
        """
        budget = self._memory.budget
        if budget.free_bytes >= num_bytes:
            return True
        kept = [other for other in self if other.is_busy or other is keep]
        pages = {page for other in kept for page in other.pages() | other.reserved_pages}
        if budget.total_bytes - self._memory.bytes_of_pages(pages) < num_bytes:
            return False
        idle = sorted((other for other in self if other not in kept), key=lambda other: other.last_used)
        for other in idle:
            if budget.free_bytes >= num_bytes:
                break
            self.close(other.id)
            self.num_given_up += 1
        return budget.free_bytes >= num_bytes

    def can_hold(self, session: Session, plan: Plan, reply_tokens: int) -> bool:
        """Whether a session would have room for a plan if it were alone; a page with a hole counts whole."""
        gone = [index for drop in plan.drops for index in drop.records]
        num_new = -(-(plan.new_tokens + reply_tokens) // PAGE_TOKENS)
        held = self._memory.bytes_of_pages(session.pages(without=gone))
        return held + num_new * self._memory.page_bytes[EXACT] <= self._memory.budget.total_bytes

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
                others = segment.owners - owners[id(segment)]
                assert others >= 0 if self._memory.is_shared else others == 0
        assert len(owners) == len(self._memory.store) or self._memory.is_shared
