"""Recorded sessions: JSON lines of conversations that an agent had."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnkv.conversation.messages import parse_messages
from turnkv.conversation.tools import parse_tools
from turnkv.errors import InvalidFileError, InvalidMessagesError
from turnkv.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSession:
    """One conversation, checked. Each assistant message in it is a request to replay."""

    id: str
    messages: tuple[dict[str, object], ...]
    tools: tuple[dict[str, object], ...]

    @property
    def requests(self) -> tuple[int, ...]:
        """Indices of the assistant messages that have something to answer before them."""
        roles = [message["role"] for message in self.messages]
        answerable = [index for index, role in enumerate(roles) if role in (Role.USER, Role.TOOL)]
        first = answerable[0] if answerable else len(roles)
        return tuple(index for index, role in enumerate(roles) if role == Role.ASSISTANT and index > first)


def load_sessions(path: Path, *, limit: int | None = None, ids: Iterable[str] | None = None) -> list[RecordedSession]:
    """Read sessions from JSON lines `{"id", "messages", "tools"?, …}`; other fields are ignored.

    Args:
        path: the file.
        limit: read the first so many; None reads all.
        ids: read these alone, in the file's order; None reads all.

    Raises:
        InvalidFileError: the file cannot be read, or a line is no session; names file and line.
    """
    wanted = None if ids is None else set(ids)
    sessions: list[RecordedSession] = []
    try:
        # Not `splitlines`: text in JSON may hold other line separators as they are.
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFileError(f"{path}: cannot be read ({error}); give a file of JSON lines") from None
    for number, line in enumerate(lines, 1):
        if limit is not None and len(sessions) >= limit:
            break
        if not line.strip():
            continue
        session = _parse(line, f"{path}:{number}", number)
        if any(session.id == other.id for other in sessions):
            raise InvalidFileError(f"{path}:{number}: session {session.id!r} occurs twice; give each its own id")
        if wanted is None or session.id in wanted:
            sessions.append(session)
    if wanted is not None and (missing := wanted - {session.id for session in sessions}):
        raise InvalidFileError(f"{path}: holds no session {sorted(missing)[0]!r}; check its id")
    if not sessions:
        raise InvalidFileError(f"{path}: holds no session; give a file of JSON lines, one conversation each")
    return sessions


def _parse(line: str, where: str, number: int) -> RecordedSession:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(f"{where}: is no JSON ({error}); write one conversation a line") from None
    if not isinstance(raw, dict) or "messages" not in raw:
        raise InvalidFileError(f'{where}: is no session; write {{"id": …, "messages": […]}}')
    try:
        messages = parse_messages(raw["messages"], allow_open_calls=True)
        tools = parse_tools(raw.get("tools") or ())
    except InvalidMessagesError as error:
        raise InvalidFileError(f"{where}: {error}") from None
    return RecordedSession(
        id=str(raw.get("id", f"line-{number}")),
        messages=tuple(message.to_openai() for message in messages),
        tools=tools,
    )


def read_ids(path: Path) -> Sequence[str]:
    """Session ids from a text file, one a line; `#` begins a comment.

    Raises:
        InvalidFileError: the file cannot be read.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFileError(f"{path}: cannot be read ({error}); give a text file of ids") from None
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
