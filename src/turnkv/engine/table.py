"""The session table: which conversations are held, and which is given up when another needs room."""

from collections.abc import Iterator
from itertools import count

from turnkv.cache import PagePool, SegmentStore
from turnkv.engine.request import Request
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

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

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
        name = session_id or SessionId(f"s{next(self._ids)}")
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
        """Reserve slots behind a session, giving up idle ones where it must; False if even that is not enough."""
        needed = session.writer.num_pages_needed(num_tokens)
        idle = sorted(
            (other for other in self if not other.is_busy and other is not session), key=lambda other: other.last_used
        )
        while self._pool.num_free_pages < needed:
            if not idle:
                return False
            self.close(idle.pop(0).id)
            self.num_given_up += 1
        session.writer.reserve(num_tokens)
        return True

    def take_back(self, request: Request) -> None:
        """Undo what a request did to its session, save for turns dropped."""
        session = request.session
        if session is None:
            return
        session.abandon()
        session.truncate(request.num_records_before)
        session.is_busy = False
        request.session = None
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
