"""The same session under several policies, side by side: what the table in the terminal and the report both state.

The first result is the reference (as a rule the policy `full`). Policies are compared over the requests that all
of them answered, so a run that an error stopped early does not look cheap.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from turnkv.errors import TurnKVError
from turnkv.evaluate.results import ReplayResult, RequestResult, SessionResult, mean_nll


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigures:
    """What some requests cost under one policy. No requests, no cost: all is 0 and `nll` None."""

    peak_kv_bytes: int
    ttft_s: float
    """Sum of the first-token times."""

    late_ttft_s: float
    """Median first-token time over the last quarter of the requests."""

    computed_tokens: int
    nll: float | None

    @classmethod
    def of(cls, requests: Sequence[RequestResult]) -> "PolicyFigures":
        """The figures of these requests."""
        late = requests[-max(1, len(requests) // 4) :]
        return cls(
            peak_kv_bytes=max((request.highest_kv_bytes for request in requests), default=0),
            ttft_s=sum(request.ttft_s for request in requests),
            late_ttft_s=statistics.median(request.ttft_s for request in late) if late else 0.0,
            computed_tokens=sum(request.computed_tokens for request in requests),
            nll=mean_nll(requests),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One session under one policy."""

    policy: str
    """The policy's name, made unlike the other runs' names."""

    colour: int
    """Which of the report's colours is the policy's: its place among all results."""

    session: SessionResult

    error_turn: int | None = None
    """Turn of the request that failed; None if none did."""

    @property
    def has_drops(self) -> bool:
        """Whether any turn was dropped."""
        return any(request.dropped_turns for request in self.session.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One session under every policy that was replayed over it."""

    session_id: str
    runs: tuple[Run, ...]

    @property
    def num_shared(self) -> int:
        """Requests that every run answered; a replay asks the same ones in the same order, so a count tells which."""
        return min(len(run.session.turns) for run in self.runs)

    @property
    def num_requests(self) -> int:
        """Requests that any run answered or failed at."""
        return max(len(run.session.turns) + (run.error_turn is not None) for run in self.runs)

    def shared_figures(self, run: Run) -> PolicyFigures:
        """The figures of `run` over the requests that every run answered."""
        return PolicyFigures.of(run.session.turns[: self.num_shared])


def compare(results: Sequence[ReplayResult], session_id: str) -> Comparison:
    """Put the runs of one session side by side, in the order of `results`.

    Raises:
        TurnKVError: no result has a session of this id.
    """
    named = [
        (name, colour, session)
        for colour, (name, result) in enumerate(zip(policy_names(results), results, strict=True))
        if (session := result.session(session_id)) is not None
    ]
    if not named:
        known = ", ".join(session_ids(results)) or "none"
        raise TurnKVError(f"no result has a session {session_id!r}; the results have {known}")
    sessions = [session for _, _, session in named]
    return Comparison(
        session_id=session_id,
        runs=tuple(
            Run(policy=name, colour=colour, session=session, error_turn=_error_turn(session, sessions))
            for name, colour, session in named
        ),
    )


def session_ids(results: Sequence[ReplayResult]) -> list[str]:
    """The ids in any of the results, each once, in order."""
    return list(dict.fromkeys(session.id for result in results for session in result.sessions))


def policy_names(results: Sequence[ReplayResult]) -> list[str]:
    """Each result's policy; a name that comes again is numbered: `window`, `window (2)`."""
    names: list[str] = []
    for result in results:
        name, number = result.policy, 1
        while name in names:
            number += 1
            name = f"{result.policy} ({number})"
        names.append(name)
    return names


def _error_turn(session: SessionResult, sessions: Sequence[SessionResult]) -> int | None:
    """The turn of the request that failed: as another run has it, else the one after the last."""
    if session.error is None:
        return None
    done = len(session.turns)
    if longer := next((other for other in sessions if len(other.turns) > done), None):
        return longer.turns[done].turn
    return session.turns[-1].turn + 1 if session.turns else 0
