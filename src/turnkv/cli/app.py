"""The commands and their options. What needs torch is imported inside a command, so that `--help` is instant."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from turnkv.cli.display import error_console, out_console
from turnkv.cli.options import (
    BudgetOption,
    Dtype,
    DtypeOption,
    EngineOptions,
    Mode,
    ModelOption,
    PolicyOption,
    ThreadsOption,
    Weights,
    WeightsOption,
)
from turnkv.errors import TurnKVError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130


class _ReportingGroup(TyperGroup):
    """Turns what a command raises into one line and an exit code; the only place that does."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except TurnKVError as error:
            error_console().print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(EXIT_ERROR) from None
        except KeyboardInterrupt as interrupt:
            kept = str(interrupt) or "nothing was written"
            error_console().print(f"interrupted: {kept}", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    name="turnkv",
    cls=_ReportingGroup,
    help="A KV cache that drops whole turns of long agent conversations without computing again what follows them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run `turnkv` with the process's arguments."""
    app()


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"turnkv {version('turnkv')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(  # noqa: PLR0913, PLR0917 - one parameter an option
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for report, results and journals.")] = Path(
        "out"
    ),
    session: Annotated[
        str, typer.Option("--session", metavar="ID", help="Which demonstration session to replay.")
    ] = "checkout-incident",
    quick: Annotated[bool, typer.Option("--quick", help="Replay only the first 12 requests.")] = False,
    model: ModelOption = None,
    policy: PolicyOption = "balanced",
    dtype: DtypeOption = Dtype.BFLOAT16,
    budget: BudgetOption = "2GiB",
    threads: ThreadsOption = None,
    weights: WeightsOption = Weights.EXACT,
) -> None:
    """Replay a recorded agent session under `full` and under a policy, and show what the policy saves and costs."""
    from turnkv.cli.demo import run_demo  # noqa: PLC0415 (it imports torch)

    options = EngineOptions(model=model, policy=policy, dtype=dtype, weights=weights, budget=budget, threads=threads)
    run_demo(options, out=out, session_id=session, is_quick=quick)


@app.command()
def chat(  # noqa: PLR0913, PLR0917 - one parameter an option
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System text to begin with.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a reply at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, metavar="T", help="0 takes the likeliest token.")] = 0.0,
    model: ModelOption = None,
    policy: PolicyOption = "balanced",
    dtype: DtypeOption = Dtype.BFLOAT16,
    budget: BudgetOption = "2GiB",
    threads: ThreadsOption = None,
    weights: WeightsOption = Weights.EXACT,
) -> None:
    """Talk with a model and watch the cache turn by turn; `/help` inside lists the commands."""
    from turnkv.cli.chat import run_chat  # noqa: PLC0415 (it imports torch)

    options = EngineOptions(model=model, policy=policy, dtype=dtype, weights=weights, budget=budget, threads=threads)
    run_chat(options, system=system, max_new_tokens=max_new_tokens, temperature=temperature)


@app.command()
def replay(  # noqa: PLR0913, PLR0917 - one parameter an option
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="Recorded sessions, one conversation a line.")],
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Replay the first N sessions.")] = None,
    ids: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, metavar="FILE", help="Replay only the ids in this file, one a line."),
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="Score the recorded replies, or generate others beside them.")
    ] = Mode.SCORE,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a generated reply at most.")] = 64,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the results; an interrupted run goes on here.")
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write the journals; several sessions, a file each.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="OUT.html", help="Write a report page.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Compute nothing: what would be held and dropped, in seconds.")
    ] = False,
    model: ModelOption = None,
    policy: PolicyOption = "balanced",
    dtype: DtypeOption = Dtype.BFLOAT16,
    budget: BudgetOption = "2GiB",
    threads: ThreadsOption = None,
    weights: WeightsOption = Weights.EXACT,
) -> None:
    """Run recorded sessions request by request and measure memory, time and likelihood.

    Ends with exit code 1 if any session stopped at an error; the results are written all the same.
    """
    from turnkv.cli.replay import Outputs, run_replay  # noqa: PLC0415 (it imports torch)

    options = EngineOptions(
        model=model, policy=policy, dtype=dtype, weights=weights, budget=budget, threads=threads, is_dry=dry_run
    )
    outputs = Outputs(json=json, journal=journal, report=report)
    is_whole = run_replay(
        options, file, limit=limit, ids=ids, mode=mode, max_new_tokens=max_new_tokens, outputs=outputs
    )
    if not is_whole:
        raise typer.Exit(EXIT_ERROR)


@app.command(name="eval")
def evaluate(  # noqa: PLR0913, PLR0917 - one parameter an option
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="P", help="A preset or a TOML file; several may be given.", show_default="all"
        ),
    ] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            "--cache", metavar="NAME", help="Another library's cache, such as hf:dynamic; several may be given."
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data", metavar="FILE", help="JSON lines of items; several may be given.", show_default="examples"
        ),
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option("--text", metavar="FILE", help="Plain text whose likelihood is measured.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="KINDS",
            help="Some of session, recall, toolcall, arithmetic, leakage, text, by commas.",
            show_default="all",
        ),
    ] = None,
    protocol: Annotated[
        list[str] | None, typer.Option("--protocol", metavar="P", help="oneshot or online.", show_default="both")
    ] = None,
    ids: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, metavar="FILE", help="Only the ids in this file, one a line."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="The first N items of each kind.")] = None,
    max_requests: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Requests of a session that are replayed online, at most.")
    ] = None,
    generated: Annotated[int, typer.Option(min=0, metavar="N", help="Sums over tool results that are made up.")] = 16,
    answer: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tool calls that are generated too, and compared.")
    ] = 24,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out bad lines, and count them.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A few items of each kind: does it run at all?")] = False,
    explain: Annotated[
        str | None,
        typer.Option(metavar="SESSION", help="Print what became of one session's turns, and where likelihood fell."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the results; an interrupted run goes on here.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Write a report page, and its plots beside it.")
    ] = None,
    model: ModelOption = None,
    dtype: DtypeOption = Dtype.BFLOAT16,
    budget: BudgetOption = "4GiB",
    threads: ThreadsOption = None,
    weights: WeightsOption = Weights.EXACT,
) -> None:
    """Say what policies save and what they cost: memory, time, likelihood, decisions, recall, with intervals.

    `oneshot` prefills a history once and lets a policy act on it once; `online` replays sessions request by request.
    Every figure is compared with the policy `full` on the same engine.
    """
    from turnkv.cli.eval import EvalOptions, run_eval  # noqa: PLC0415 (it imports torch)
    from turnkv.policy import preset_names  # noqa: PLC0415 (likewise)

    options = EngineOptions(model=model, policy="full", dtype=dtype, weights=weights, budget=budget, threads=threads)
    run_eval(
        options,
        EvalOptions(
            policies=tuple(policy or preset_names()),
            caches=tuple(cache or ()),
            data=tuple(data or ()),
            texts=tuple(text or ()),
            metrics=tuple(metrics.split(",")) if metrics else (),
            protocols=tuple(protocol or ()),
            ids=ids,
            limit=2 if quick and limit is None else limit,
            max_requests=max_requests,
            generated=generated,
            num_answered=min(answer, 1) if quick else answer,
            skip_bad=skip_bad,
            is_quick=quick,
            explain=explain,
            json=json,
            report=report,
        ),
    )


@app.command()
def doctor(
    model: ModelOption = None,
    dtype: DtypeOption = Dtype.BFLOAT16,
    threads: ThreadsOption = None,
    weights: WeightsOption = Weights.EXACT,
) -> None:
    """Say what this machine and installation can do, and where the time to the first token goes."""
    from turnkv.cli.doctor import run_doctor  # noqa: PLC0415 (it times the imports itself)

    options = EngineOptions(model=model, policy="full", dtype=dtype, weights=weights, budget="64MiB", threads=threads)
    run_doctor(options)


@app.command()
def policies() -> None:
    """List the policies that ship with turnkv. `--policy` also takes a TOML file."""
    from turnkv.policy import load_policy, preset_names  # noqa: PLC0415 (the other commands import it with torch)

    for name in preset_names():
        out_console().print(load_policy(name).describe(), markup=False, highlight=False)
