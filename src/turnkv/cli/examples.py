"""The demonstration sessions: inside an installed package, or in the checkout beside it."""

from pathlib import Path

from turnkv.errors import InvalidFileError
from turnkv.evaluate.sessions import RecordedSession, load_sessions


def example_session(session_id: str) -> RecordedSession:
    """The demonstration session of this id.

    Raises:
        InvalidFileError: there is none of this id, or the sessions are not there.
    """
    sessions = [session for path in example_files() for session in load_sessions(path)]
    found = next((session for session in sessions if session.id == session_id), None)
    if found is None:
        known = ", ".join(session.id for session in sessions)
        raise InvalidFileError(f"there is no demonstration session {session_id!r}; there are {known}")
    return found


def example_files() -> list[Path]:
    """The files that hold them.

    Raises:
        InvalidFileError: they are not there.
    """
    here = Path(__file__).resolve()
    folders = (here.parent / "sessions", here.parents[3] / "examples" / "sessions")
    files = next((found for folder in folders if (found := sorted(folder.glob("*.jsonl")))), None)
    if files is None:
        raise InvalidFileError(f"no demonstration sessions in {' or '.join(map(str, folders))}; reinstall turnkv")
    return files
