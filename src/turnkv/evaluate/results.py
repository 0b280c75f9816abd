"""What a replay measured, request by request, and the JSON form in which it is kept.

    {"model", "policy", "mode", "versions": {name: version}, "settings": {...},
     "sessions": [{"id", "error": null | str, "turns": [{
         "turn", "kind", "prompt_tokens", "computed_tokens", "cached_tokens", "dropped_tokens", "noted_tokens",
         "kv_bytes", "ttft_s", "nll": null | float, "scored_tokens",
         "dropped_turns", "peak_kv_bytes", "reply", "top1"}]}],
     "totals": {"peak_kv_bytes", "computed_tokens", "nll": null | float, "wall_s"}}

`mode`, `versions`, `settings` and the last line of a turn may be absent when a file is read; they are always written.
Other keys are refused, so that a misspelt one cannot pass unseen.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from turnkv.errors import InvalidFileError, TurnKVError
from turnkv.evaluate.fields import Fields
from turnkv.types import TurnKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """What one request (one recorded assistant message) cost, and how well it was predicted."""

    turn: int
    """Number of the turn that the request belongs to."""

    kind: TurnKind
    """Kind of that turn."""

    prompt_tokens: int
    """Tokens of the prompt as the client sent it."""

    computed_tokens: int
    """Tokens of the prompt that the model computed for this request."""

    cached_tokens: int
    """Tokens of the prompt whose KV the view already held."""

    dropped_tokens: int
    """Tokens of the prompt that the view no longer held: neither computed nor read."""

    noted_tokens: int
    """Tokens of notes that the engine added."""

    kv_bytes: int
    """KV bytes of the session's view when the request ended."""

    ttft_s: float
    """Seconds from the request to its first token."""

    nll: float | None
    """Nats per token of the recorded message, the mean over `scored_tokens`; None where nothing was scored."""

    scored_tokens: int
    """Tokens of the recorded message that were scored."""

    dropped_turns: tuple[int, ...] = ()
    """Turns dropped at this request."""

    peak_kv_bytes: int | None = None
    """Most KV bytes that the view held during the request; None if not measured."""

    reply: str | None = None
    """The text generated in place of the recorded message; None where none was."""

    top1: float | None = None
    """Fraction of the scored tokens that were the likeliest; None if not measured."""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "nll", "top1"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise TurnKVError(
                    f"turn {self.turn}: {name} is {value}; the model's logits are not finite, "
                    "so load it in float32 or bfloat16"
                )

    @property
    def highest_kv_bytes(self) -> int:
        """The measured peak, or the bytes at the end where no peak was measured."""
        return self.kv_bytes if self.peak_kv_bytes is None else max(self.kv_bytes, self.peak_kv_bytes)

    def to_json(self) -> dict[str, object]:
        """The documented form, every key present."""
        return asdict(self) | {"kind": self.kind.value, "dropped_turns": list(self.dropped_turns)}

    @classmethod
    def from_json(cls, value: object, *, where: str = "turn") -> "RequestResult":
        """Read the documented form.

        Raises:
            InvalidFileError: a field is missing, unknown, of the wrong type or out of range; the message names it.
        """
        fields = Fields(value, where, known=_REQUEST_KEYS)
        request = cls(
            turn=fields.count("turn"),
            kind=TurnKind(fields.choice("kind", tuple(TurnKind))),
            prompt_tokens=fields.count("prompt_tokens"),
            computed_tokens=fields.count("computed_tokens"),
            cached_tokens=fields.count("cached_tokens"),
            dropped_tokens=fields.count("dropped_tokens"),
            noted_tokens=fields.count("noted_tokens"),
            kv_bytes=fields.count("kv_bytes"),
            ttft_s=fields.number("ttft_s"),
            nll=fields.optional("nll", fields.number, must_exist=True),
            scored_tokens=fields.count("scored_tokens"),
            dropped_turns=tuple(fields.counts("dropped_turns")) if "dropped_turns" in fields else (),
            peak_kv_bytes=fields.optional("peak_kv_bytes", fields.count),
            reply=fields.optional("reply", fields.text),
            top1=fields.optional("top1", fields.number),
        )
        if request.nll is not None and request.scored_tokens == 0:
            raise fields.error("nll", "must be null where scored_tokens is 0")
        return request


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """The requests of one session that were answered, and why the others were not."""

    id: str
    turns: tuple[RequestResult, ...] = ()
    """One entry per request, in the order of the session."""

    error: str | None = None
    """What stopped the session at the request after the last of `turns`; None if it ran to its end."""

    def to_json(self) -> dict[str, object]:
        """The documented form."""
        return {"id": self.id, "error": self.error, "turns": [request.to_json() for request in self.turns]}

    @classmethod
    def from_json(cls, value: object, *, where: str = "session") -> "SessionResult":
        """Read the documented form; raises InvalidFileError as `RequestResult.from_json` does."""
        fields = Fields(value, where, known=frozenset({"id", "error", "turns"}))
        turns = tuple(RequestResult.from_json(turn, where=place) for place, turn in fields.items("turns"))
        for i, (earlier, later) in enumerate(pairwise(turns), start=1):
            if later.turn < earlier.turn:
                raise fields.error(f"turns[{i}].turn", f"is {later.turn} after {earlier.turn}; turns may not go back")
        return cls(id=fields.text("id"), error=fields.optional("error", fields.text, must_exist=True), turns=turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a replay cost as a whole."""

    peak_kv_bytes: int
    """Most KV bytes that the view of any one session held."""

    computed_tokens: int
    """Prompt tokens computed, all sessions together."""

    nll: float | None
    """Nats per token over all scored tokens; None if none was scored."""

    wall_s: float
    """Seconds that the replay took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """One replay: some sessions, through one model, under one policy."""

    model: str
    policy: str
    sessions: tuple[SessionResult, ...]
    wall_s: float
    """Seconds that the replay took."""

    mode: str = "score"
    """What was done with each recorded message: `score` it, or `generate` in its place."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Version of each package that the figures depend on."""

    settings: Mapping[str, object] = field(default_factory=dict)
    """The setting that made it (dtype, threads, CPU, window marks, date, command, ...), as JSON values."""

    @property
    def totals(self) -> Totals:
        """Computed from the requests, so they can never disagree with them."""
        requests = [request for session in self.sessions for request in session.turns]
        return Totals(
            peak_kv_bytes=max((request.highest_kv_bytes for request in requests), default=0),
            computed_tokens=sum(request.computed_tokens for request in requests),
            nll=mean_nll(requests),
            wall_s=self.wall_s,
        )

    def session(self, session_id: str) -> SessionResult | None:
        """The session of this id, or None if this replay has none."""
        return next((session for session in self.sessions if session.id == session_id), None)

    def to_json(self) -> dict[str, object]:
        """The documented form."""
        return {
            "model": self.model,
            "policy": self.policy,
            "mode": self.mode,
            "versions": dict(self.versions),
            "settings": dict(self.settings),
            "sessions": [session.to_json() for session in self.sessions],
            "totals": asdict(self.totals),
        }

    @classmethod
    def from_json(cls, value: object, *, where: str = "") -> "ReplayResult":
        """Read the documented form.

        Raises:
            InvalidFileError: a field is missing, unknown, of the wrong type or out of range, an id occurs twice,
                or the totals are not those of the requests; the message names the field.
        """
        fields = Fields(value, where, known=_REPLAY_KEYS)
        totals = Fields(fields.required("totals"), fields.path("totals"), known=_TOTALS_KEYS)
        sessions = tuple(SessionResult.from_json(item, where=place) for place, item in fields.items("sessions"))
        ids = [session.id for session in sessions]
        for i, session_id in enumerate(ids):
            if session_id in ids[:i]:
                raise fields.error(f"sessions[{i}].id", f"{session_id!r} is there twice; give each session its own id")
        versions = fields.mapping("versions") if "versions" in fields else {}
        result = cls(
            model=fields.text("model"),
            policy=fields.text("policy"),
            mode=fields.text("mode") if "mode" in fields else "score",
            versions={name: Fields(versions, fields.path("versions")).text(name) for name in versions},
            settings=fields.mapping("settings") if "settings" in fields else {},
            sessions=sessions,
            wall_s=totals.number("wall_s"),
        )
        result._check_totals(totals)
        return result

    def _check_totals(self, stated: Fields) -> None:
        totals = self.totals
        for name in ("peak_kv_bytes", "computed_tokens"):
            if stated.count(name) != getattr(totals, name):
                raise stated.error(name, f"is {stated.count(name)}, but the turns give {getattr(totals, name)}")
        nll = stated.optional("nll", stated.number, must_exist=True)
        agrees = nll == totals.nll if nll is None or totals.nll is None else math.isclose(nll, totals.nll, rel_tol=1e-6)
        if not agrees:
            raise stated.error("nll", f"is {nll}, but the turns give {totals.nll}")

    def write_json(self, path: Path) -> None:
        """Write the documented form to `path`, whole or not at all.

        Raises:
            TurnKVError: the file cannot be written. What was at `path` is still there.
        """
        write_atomically(path, json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False, indent=1) + "\n")

    @classmethod
    def read_json(cls, path: Path) -> "ReplayResult":
        """Read a file that `write_json` wrote.

        Raises:
            InvalidFileError: the file cannot be read, is no JSON, or has not the documented form.
        """
        try:
            value: object = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidFileError(f"{path}: cannot be read ({error.strerror}); give a file of results") from error
        except (ValueError, RecursionError) as error:
            raise InvalidFileError(f"{path}: is no JSON ({error}); give a file of results") from error
        return cls.from_json(value, where=f"{path}: ")


def mean_nll(requests: Iterable[RequestResult]) -> float | None:
    """Nats per token over all scored tokens of `requests`; None if none was scored."""
    scored = [(request.nll, request.scored_tokens) for request in requests if request.nll is not None]
    tokens = sum(count for _, count in scored)
    return math.fsum(nll * count for nll, count in scored) / tokens if tokens else None


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, whole or not at all, and make the folders that lead there.

    A lone surrogate, which UTF-8 cannot hold, becomes the escape that JSON and JavaScript read back.

    Raises:
        TurnKVError: the file cannot be written. What was at `path` is still there.
    """
    # Beside its target, since a rename is atomic only within one file system; not from `tempfile`, whose files
    # only their owner can read.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as file:
                file.write(text.encode("utf-8", errors="backslashreplace"))
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise TurnKVError(
            f"{path}: cannot be written ({error.strerror}); free some space or give another place"
        ) from error


_REQUEST_KEYS: frozenset[str] = frozenset(RequestResult.__dataclass_fields__)
_TOTALS_KEYS: frozenset[str] = frozenset(Totals.__dataclass_fields__)
_REPLAY_KEYS: frozenset[str] = frozenset(
    ("model", "policy", "mode", "versions", "settings", "sessions", "totals"),
)
