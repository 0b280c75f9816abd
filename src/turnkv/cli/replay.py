"""`turnkv replay`: recorded sessions through an engine, with a table of what each cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from turnkv.cli.display import error_console, out_console, request_bar, say
from turnkv.cli.options import EngineOptions, Mode
from turnkv.engine import Engine
from turnkv.errors import InvalidFileError
from turnkv.evaluate.quantities import MISSING, bytes_text, count_text, nll_text, seconds_text
from turnkv.evaluate.replay import AfterRequest, Answered, replay
from turnkv.evaluate.report import write_report
from turnkv.evaluate.results import ReplayResult, RequestResult, SessionResult, mean_nll
from turnkv.evaluate.sessions import RecordedSession, load_sessions, read_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Files to write; None writes none."""

    json: Path | None = None
    journal: Path | None = None
    report: Path | None = None


def run_replay(  # noqa: PLR0913 - the command's own options
    options: EngineOptions,
    file: Path,
    *,
    limit: int | None,
    ids: Path | None,
    mode: Mode,
    max_new_tokens: int,
    outputs: Outputs,
) -> bool:
    """Replay and print; whether every session ran to its end.

    Raises:
        TurnKVError: the sessions cannot be read, the model not loaded, or a file not written.
    """
    sessions = load_sessions(file, limit=limit, ids=None if ids is None else _read_ids(ids))
    engine = options.load_engine(say)
    try:
        result = replay_with_bar(
            engine, sessions, outputs=outputs, mode=mode, max_new_tokens=max_new_tokens, label=engine.policy.name
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_what_is_kept(outputs.json)) from None
    out_console().print(session_table(result))
    if outputs.report is not None:
        write_report(outputs.report, [result], title=f"{file.name} under {engine.policy.name}")
    for path in (outputs.json, outputs.journal, outputs.report):
        if path is not None:
            is_several = path is outputs.journal and len(sessions) > 1
            say(
                f"written: {path.with_name(f'{path.stem}-ID{path.suffix}')}, one a session"
                if is_several
                else f"written: {path}"
            )
    for session in result.sessions:
        if session.error is not None:
            line = f"error: session {session.id}: {session.error}"
            error_console().print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    return all(session.error is None for session in result.sessions)


def replay_with_bar(  # noqa: PLR0913 - the replay's own settings
    engine: Engine,
    sessions: Sequence[RecordedSession],
    *,
    outputs: Outputs,
    label: str,
    mode: Mode = Mode.SCORE,
    max_new_tokens: int = 64,
    after_request: AfterRequest = lambda answered: None,
) -> ReplayResult:
    """Replay sessions behind a progress bar; see `turnkv.evaluate.replay.replay`."""
    counts = [len(session.requests) for session in sessions]
    before = {session.id: sum(counts[:i]) for i, session in enumerate(sessions)}
    with request_bar(label, sum(counts)) as move:

        def count(answered: Answered) -> None:
            result = answered.result
            replied = result.scored_tokens if mode is Mode.SCORE else 0
            done = before[answered.session.id] + answered.session.requests.index(answered.index) + 1
            move(done, result.computed_tokens + replied)
            after_request(answered)

        return replay(
            engine,
            sessions,
            mode=mode.value,
            out=outputs.json,
            journal=outputs.journal,
            max_new_tokens=max_new_tokens,
            progress=lambda session, done: move(before[session.id] + done, 0),
            after_request=count,
            say=say,
        )


def session_table(result: ReplayResult) -> Table:
    """What each session cost, and all together. Fits into 80 columns while ids are short."""
    requests = [request for session in result.sessions for request in session.turns]
    totals = result.totals
    table = Table(
        title=Text(f"{result.model} under {result.policy}", style="bold"),
        title_justify="left",
        caption=Text(
            "Tokens are sums over all requests: prompt = cached + computed + dropped. NLL in nats per token.\n"
            f"{len(requests)} requests in {seconds_text(result.wall_s)}.",
            style="dim",
        ),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_footer=True,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("session", Text("all"), overflow="ellipsis")
    cells = _cells(requests, sum(_num_turns(session) for session in result.sessions), totals.peak_kv_bytes)
    for name, total in zip(("turns", "prompt", "computed", "dropped", "peak KV", "NLL"), cells, strict=True):
        table.add_column(name, Text(total), justify="right", no_wrap=True)
    num_errors = sum(session.error is not None for session in result.sessions)
    table.add_column("error", Text(str(num_errors) if num_errors else "none"), no_wrap=True)
    for session in result.sessions:
        peak = max((request.highest_kv_bytes for request in session.turns), default=0)
        row = _cells(session.turns, _num_turns(session), peak)
        stopped = f"after request {len(session.turns)}" if session.error is not None else ""
        table.add_row(Text(session.id), *map(Text, row), Text(stopped, style="red"))
    return table


def _cells(requests: Sequence[RequestResult], num_turns: int, peak_kv_bytes: int) -> list[str]:
    return [
        count_text(num_turns),
        count_text(sum(request.prompt_tokens for request in requests)),
        count_text(sum(request.computed_tokens for request in requests)),
        count_text(sum(request.dropped_tokens for request in requests)),
        bytes_text(peak_kv_bytes) if requests else MISSING,
        nll_text(mean_nll(requests)),
    ]


def _num_turns(session: SessionResult) -> int:
    return session.turns[-1].turn + 1 if session.turns else 0


def _read_ids(path: Path) -> Sequence[str]:
    try:
        return read_ids(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFileError(f"{path}: cannot be read ({error}); give a text file of ids, one a line") from None


def _what_is_kept(json: Path | None) -> str:
    if json is None:
        return "nothing was written; with --json OUT a run can go on where it stopped"
    if not json.with_name(f"{json.name}.unfinished").exists():
        return "no session was finished yet, so nothing was kept"
    return f"the sessions that were finished are kept beside {json}; the same command goes on from there"
