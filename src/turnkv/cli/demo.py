"""`turnkv demo`: one recorded session under `full` and under a policy, side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from turnkv.cli.display import out_console, print_lines, say
from turnkv.cli.examples import example_session
from turnkv.cli.options import EngineOptions
from turnkv.cli.replay import Outputs, replay_with_bar
from turnkv.config import SamplingParams
from turnkv.engine import Engine
from turnkv.errors import TurnKVError
from turnkv.evaluate.quantities import count_text
from turnkv.evaluate.replay import Answered
from turnkv.evaluate.report import AnswerPair, write_report
from turnkv.evaluate.results import ReplayResult
from turnkv.evaluate.sessions import RecordedSession
from turnkv.evaluate.summary import claim_line, comparison_table
from turnkv.policy import FULL, Policy
from turnkv.types import Role

_QUICK_REQUESTS = 12
_QUESTIONS = 3
_ANSWER_TOKENS = 48


def run_demo(options: EngineOptions, *, out: Path, session_id: str, is_quick: bool) -> None:
    """Replay, print the comparison, write report, results and journals into `out`.

    Raises:
        TurnKVError: the model cannot be prepared, or a file not written.
    """
    session = example_session(session_id)
    if is_quick:
        session = replace(session, messages=session.messages[: session.requests[:_QUICK_REQUESTS][-1] + 1])
    engine = options.load_engine(say)
    policy = engine.policy
    if policy.window is None:
        raise TurnKVError(f"policy {policy.name}: keeps every turn, as `full` does; compare another, such as window")
    questions = _questions(session, num_asked=1 if is_quick else _QUESTIONS)
    say(
        f"replaying {len(session.requests)} requests of {session.id} under full and under {policy.name}; "
        f"the model also answers the last {len(questions)} question{'s' * (len(questions) != 1)} itself"
    )
    try:
        runs = [_run(engine.with_policy(each), session, out, questions) for each in (FULL, policy)]
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what was measured so far is in {out}/; a demo starts anew") from None
    results = [run.result for run in runs]
    answers = _answer_pairs(session, runs, questions)
    _print_comparison(runs, session, policy)
    if is_quick:
        print_lines([f"--quick: only {len(session.requests)} requests, which may be too few for a drop."], style="dim")
    _print_answers(answers)
    write_report(out / "report.html", results, title=f"{session.id}: full and {policy.name}", answers=answers)
    names = ("report.html", *(f"{r.policy}{end}" for r in results for end in (".json", ".journal.jsonl")))
    out_console().print()
    print_lines([f"Written to {out}/: {', '.join(names)}"])


@dataclass(slots=True, kw_only=True)
class _Run:
    """A replay, and what was asked beside it."""

    result: ReplayResult
    head_kv_bytes: int = 0
    """KV of system text and tool schemas."""
    answers: dict[int, str] = field(default_factory=dict)
    """Generated text by the index of the recorded reply."""


def _run(engine: Engine, session: RecordedSession, out: Path, asked: Mapping[int, str]) -> _Run:
    answers: dict[int, str] = {}
    heads: set[int] = set()

    def ask(answered: Answered) -> None:
        heads.add(engine.session(answered.session_id).record_bytes(0))
        if answered.index in asked:
            answers[answered.index] = _answer(engine, answered)

    name = engine.policy.name
    outputs = Outputs(journal=out / f"{name}.journal.jsonl")
    result = replay_with_bar(engine, [session], outputs=outputs, label=f"{name:8}", after_request=ask)
    result.write_json(out / f"{name}.json")
    return _Run(result=result, head_kv_bytes=max(heads, default=0), answers=answers)


def _answer(engine: Engine, answered: Answered) -> str:
    """The model's own reply where the recorded one was scored: on a fork, so that the replay is as without it."""
    sampling = SamplingParams(max_new_tokens=_ANSWER_TOKENS)
    try:
        reply = engine.respond(
            answered.session.messages[: answered.index],
            answered.session.tools,
            sampling=sampling,
            session_id=answered.session_id,
        )
    except TurnKVError as error:
        return f"(no answer: {error})"
    assert reply.session_id != answered.session_id
    engine.close_session(reply.session_id)
    calls = ", ".join(f"{call.name}(…)" for call in reply.message.tool_calls)
    text = " ".join(part for part in (reply.message.content.strip(), f"calls {calls}" if calls else "") if part)
    return f"{text} …" if reply.finish_reason == "length" else text or "(an empty reply)"


def _questions(session: RecordedSession, *, num_asked: int) -> dict[int, str]:
    """Index of the recorded answer, and the question, for the last few user messages that got one in words."""
    found: dict[int, str] = {}
    question = ""
    for index, message in enumerate(session.messages):
        if message["role"] == Role.USER:
            question = str(message["content"])
        elif index in session.requests and not message.get("tool_calls"):
            found[index] = question
    by_question = {asked: index for index, asked in found.items()}
    return {index: asked for asked, index in list(by_question.items())[-num_asked:]}


def _answer_pairs(session: RecordedSession, runs: Sequence[_Run], questions: Mapping[int, str]) -> list[AnswerPair]:
    return [
        AnswerPair(
            question=question,
            recorded=str(session.messages[index]["content"]),
            answers={run.result.policy: run.answers[index] for run in runs if index in run.answers},
        )
        for index, question in questions.items()
    ]


def _print_comparison(runs: Sequence[_Run], session: RecordedSession, policy: Policy) -> None:
    full, other = (run.result for run in runs)
    console = out_console()
    console.print()
    console.print(comparison_table([full, other], session.id), soft_wrap=False)
    console.print()
    assert policy.window is not None
    claim = claim_line(
        full, other, session_id=session.id, window_turns=policy.window.low, fixed_kv_bytes=runs[0].head_kv_bytes
    )
    print_lines([claim], style="bold")
    console.print()
    console.print(_account_table(runs))


def _account_table(runs: Sequence[_Run]) -> Table:
    """Where each policy's prompt tokens came from: every one is cached, computed or dropped."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    for _ in range(4):
        table.add_column(justify="right")
    table.add_row("Token account", "prompt =", "cached +", "computed +", "dropped", style="dim")
    for run in runs:
        requests = [request for each in run.result.sessions for request in each.turns]
        table.add_row(
            Text(run.result.policy),
            count_text(sum(request.prompt_tokens for request in requests)),
            count_text(sum(request.cached_tokens for request in requests)),
            count_text(sum(request.computed_tokens for request in requests)),
            count_text(sum(request.dropped_tokens for request in requests)),
        )
    return table


def _print_answers(answers: Sequence[AnswerPair]) -> None:
    console = out_console()
    for pair in answers:
        console.print()
        console.print(Text(pair.question, style="bold"))
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="dim")
        table.add_column(ratio=1)
        for name, text in {"recorded": pair.recorded, **pair.answers}.items():
            table.add_row(Text(name), Text(" ".join(text.split())))
        console.print(Padding(table, (0, 0, 0, 2)))
