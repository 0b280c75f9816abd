"""The report and the table, on made-up results: `full` and `window`, drops, an error, an empty session."""

import io
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs
from rich.console import Console

from turnkv.errors import TurnKVError
from turnkv.evaluate.comparison import PolicyFigures, compare, session_ids
from turnkv.evaluate.quantities import bytes_text, difference_text, ranges_text, ratio_text
from turnkv.evaluate.report import AnswerPair, write_report
from turnkv.evaluate.results import ReplayResult, RequestResult, SessionResult, mean_nll
from turnkv.evaluate.summary import claim_line, comparison_table, sampled_requests
from turnkv.types import TurnKind

TOKEN_BYTES = 23_040
SETTINGS = {
    "dtype": "float32",
    "threads": 2,
    "cpu": "AMD EPYC 9B14",
    "date": "2026-11-30",
    "command": "turnkv eval --policy full --policy window examples/sessions",
}


def session(session_id: str, num_turns: int, *, high: int | None = None, low: int = 8, seed: int = 1) -> SessionResult:
    """A session whose view grows by a few hundred tokens a turn, and drops from `high` closed turns down to `low`."""
    rng = random.Random(seed)
    system, held, dropped, turns = 420, list[tuple[int, int]](), 0, []
    for turn in range(num_turns):
        kind = TurnKind.TOOL if rng.random() < 0.45 else TurnKind.CHAT
        prompt, reply = rng.randint(80, 620 if kind is TurnKind.TOOL else 240), rng.randint(30, 140)
        nll = 1.15 + 0.9 / (1 + turn / 4) + rng.gauss(0, 0.16)
        jitter = rng.uniform(0.9, 1.15)
        gone: tuple[int, ...] = ()
        if high is not None and len(held) > high:
            gone = tuple(number for number, _ in held[:-low])
            dropped += sum(tokens for _, tokens in held[:-low])
            held = held[-low:]
        cached = system + sum(tokens for _, tokens in held) if turn else 0
        computed = prompt + (system if turn == 0 else 0)
        held.append((turn, prompt + reply))
        kv_tokens = system + sum(tokens for _, tokens in held)
        turns.append(
            RequestResult(
                turn=turn,
                kind=kind,
                prompt_tokens=cached + computed + dropped,
                computed_tokens=computed,
                cached_tokens=cached,
                dropped_tokens=dropped,
                noted_tokens=0,
                kv_bytes=kv_tokens * TOKEN_BYTES,
                peak_kv_bytes=kv_tokens * TOKEN_BYTES,
                ttft_s=(0.02 + computed * 9e-4 + (cached + computed) * 3.2e-5) * jitter,
                nll=max(0.05, nll + (0.018 if dropped else 0)),
                scored_tokens=reply,
                dropped_turns=gone,
            )
        )
    return SessionResult(id=session_id, turns=tuple(turns))


def two_policies() -> list[ReplayResult]:
    """Three sessions: a long one, one whose full run ended with an error at turn 41, and one with no request."""
    full = session("refactor-the-parser", 64)
    errored = session("support-desk-week", 58, seed=2)
    stopped = replace(
        errored,
        turns=errored.turns[:41],
        error="session needs 312.4 MB of KV but the budget is 300.0 MB; raise --budget or choose a policy that drops",
    )
    empty = SessionResult(id="empty")
    common = {"threads": 2}
    versions = {"turnkv": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"}
    return [
        ReplayResult(
            model="SmolLM2-135M-Instruct",
            policy="full",
            sessions=(full, stopped, empty),
            wall_s=412.5,
            versions=versions,
            settings=SETTINGS | common,
        ),
        ReplayResult(
            model="SmolLM2-135M-Instruct",
            policy="window",
            sessions=(
                session("refactor-the-parser", 64, high=12),
                session("support-desk-week", 58, high=12, seed=2),
                empty,
            ),
            wall_s=231.0,
            versions=versions,
            settings=SETTINGS | common | {"window": {"high": 12, "low": 8}, "keep": {"tool_results": "raw"}},
        ),
    ]


def answers() -> list[AnswerPair]:
    """Two questions: one that both policies answer, one that only the full policy does."""
    return [
        AnswerPair(
            question="Which file did we decide to split first, and why?",
            recorded="`parser.py`, because the tokenizer and the grammar change for different reasons.",
            answers={
                "full": "parser.py: the tokenizer and the grammar in it change for different reasons.",
                "window": "We split parser.py first. The tokenizer and the grammar change for different reasons, "
                "so they should live apart.",
            },
        ),
        AnswerPair(
            question="第三步里失败的测试叫什么名字?",
            recorded="test_nested_quotes_keep_their_escapes",
            answers={
                "full": "test_nested_quotes_keep_their_escapes",
                "window": "I no longer have the output of step 3; please run the tests again.",
            },
        ),
    ]


@pytest.fixture
def page(tmp_path: Path) -> str:
    """The report of `two_policies`."""
    write_report(tmp_path / "report.html", two_policies(), title="Window against full", answers=answers())
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def own_text(page: str) -> str:
    """The page without Plotly's own source."""
    source = get_plotlyjs()
    assert page.count(source) == 1, "Plotly must be in the page, once"
    return page.replace(source, "")


def plots_of(page: str) -> list[dict[str, dict[str, Any]]]:
    """The figures that the page draws, session by session."""
    match = re.search(r'<script type="application/json" id="plots">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    plots: list[dict[str, dict[str, Any]]] = json.loads(match[1])
    return plots


class Visible(HTMLParser):
    """Collects a page's tags, and its text outside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._is_code = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_code = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._is_code = False

    def handle_data(self, data: str) -> None:
        if not self._is_code:
            self.text += data


def visible(page: str) -> Visible:
    parser = Visible()
    parser.feed(own_text(page))
    parser.close()
    return parser


def one(result: ReplayResult, *sessions: SessionResult) -> ReplayResult:
    return replace(result, sessions=sessions)


def rendered(results: list[ReplayResult], session_id: str, *, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(comparison_table(results, session_id))
    return console.export_text()


def test_the_report_loads_nothing_from_elsewhere(page: str) -> None:
    text = own_text(page)
    assert not re.search(r"https?:|(src|href|srcset|action|poster)\s*=|@import|@font-face|url\(|fetch\(|XMLHttp", text)
    assert not {tag for tag, _ in visible(page).tags} & {"link", "img", "iframe", "object", "embed", "base", "a"}


def test_the_report_forbids_its_own_scripts_to_load_anything(page: str) -> None:
    metas = [attributes for tag, attributes in visible(page).tags if tag == "meta"]
    policy = next(meta["content"] for meta in metas if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "connect-src" not in policy


def test_plotly_can_be_inlined_without_ending_its_script_early() -> None:
    assert "</script" not in get_plotlyjs().lower()


def test_whatever_data_says_is_shown_as_text(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}"
    full, window = two_policies()
    results = [
        replace(
            result,
            policy=f"{result.policy}{hostile}",
            model=hostile,
            versions={hostile: hostile},
            settings={hostile: hostile, "nested": {hostile: [hostile]}},
            sessions=(
                replace(result.sessions[0], id=hostile, turns=result.sessions[0].turns[:9], error=hostile),
                replace(result.sessions[0], id=f"second {hostile}"),
            ),
        )
        for result in (full, window)
    ]
    pair = AnswerPair(question=hostile, recorded=hostile, answers={results[0].policy: hostile, hostile: hostile})
    write_report(tmp_path / "report.html", results, title=hostile, answers=[pair])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")

    seen = visible(page)
    assert [tag for tag, _ in seen.tags].count("script") == 3
    assert "img" not in [tag for tag, _ in seen.tags]
    assert not [name for _, attributes in seen.tags for name in attributes if name.startswith("on")]
    assert hostile in seen.text
    # Plotly reads tags in the names of its traces, so there they are escaped once more.
    names = [
        str(trace.get("name", "")) for plots in plots_of(page) for plot in plots.values() for trace in plot["data"]
    ]
    assert any("alert(1)" in name for name in names)
    assert not any("<" in name for name in names)


def test_every_session_has_its_plots_and_the_empty_one_says_so(page: str) -> None:
    assert [sorted(plots) for plots in plots_of(page)] == [["kv", "nll", "tokens", "ttft"]] * 2 + [[]]
    assert "This session holds no request" in visible(page).text


def test_a_marker_stands_wherever_turns_were_dropped(page: str) -> None:
    window = two_policies()[1].sessions[0]
    markers = next(trace for trace in plots_of(page)[0]["kv"]["data"] if trace["name"] == "window: turns dropped")
    assert markers["x"] == [request.turn for request in window.turns if request.dropped_turns]


def test_an_error_is_shown_at_the_turn_where_it_happened(page: str) -> None:
    text = visible(page).text
    assert "full stopped at turn 41" in text
    assert "session needs 312.4 MB of KV" in text
    for name in ("kv", "ttft"):
        cross = next(trace for trace in plots_of(page)[1][name]["data"] if trace["name"] == "full: error")
        assert cross["x"] == [41]


def test_figures_in_the_cards_are_over_the_requests_that_both_policies_answered() -> None:
    comparison = compare(two_policies(), "support-desk-week")
    full, window = comparison.runs
    assert comparison.num_shared == 41
    assert comparison.num_requests == 58
    assert comparison.shared_figures(window).computed_tokens == comparison.shared_figures(full).computed_tokens
    assert comparison.shared_figures(window) == PolicyFigures.of(window.session.turns[:41])


def test_the_late_first_token_time_is_the_median_of_the_last_quarter() -> None:
    requests = [replace(request, ttft_s=float(request.turn)) for request in session("s", 8).turns]
    assert PolicyFigures.of(requests).late_ttft_s == 6.5
    assert PolicyFigures.of(requests[:3]).late_ttft_s == 2.0


def test_the_table_of_the_report_has_a_row_for_each_request_and_says_where_it_failed(page: str) -> None:
    rows = re.findall(r'<tr><th scope="row">(\d+)</th>(.*?)</tr>', page)
    assert [int(turn) for turn, _ in rows] == [*range(64), *range(58)]
    failed = [turn for turn, cells in rows if "error" in cells]
    assert failed == ["41"]
    widths = {cells.count("<td") for _, cells in rows}
    assert widths == {1 + 4 + 5}, "kind, four figures of full, and five of window, which drops turns"


def test_the_first_plot_holds_the_bytes_in_the_unit_of_its_heading(page: str) -> None:
    plot = plots_of(page)[0]["kv"]
    first = two_policies()[0].sessions[0].turns[0]
    assert plot["layout"]["meta"]["unit"] == "MB"
    assert plot["data"][0]["y"][0] == pytest.approx(first.kv_bytes / 1e6)


def test_the_line_of_the_nll_ends_at_the_mean_of_the_session(page: str) -> None:
    line = next(trace for trace in plots_of(page)[0]["nll"]["data"] if trace["mode"] == "lines")
    assert line["y"][-1] == pytest.approx(mean_nll(two_policies()[0].sessions[0].turns))


EDGE_CASES: dict[str, list[ReplayResult]] = {
    "one session": [one(result, result.sessions[0]) for result in two_policies()],
    "one policy": two_policies()[:1],
    "five policies": [replace(two_policies()[1], policy=f"window-{i}") for i in range(5)],
    "one policy twice": [two_policies()[0]] * 2,
    "no session": [one(result) for result in two_policies()],
    "one request": [one(result, session("s", 1)) for result in two_policies()],
    "an error before the first request": [
        one(two_policies()[0], SessionResult(id="s", error="too long")),
        one(two_policies()[1], session("s", 3)),
    ],
    "an error before the first request of both": [one(two_policies()[0], SessionResult(id="s", error="no"))] * 2,
    "a session that one policy lacks": [
        one(two_policies()[0], session("a", 3)),
        one(two_policies()[1], session("b", 3, high=1, low=1)),
    ],
    "nothing scored": [
        one(
            result,
            SessionResult(id="s", turns=tuple(replace(t, nll=None, scored_tokens=0) for t in session("s", 5).turns)),
        )
        for result in two_policies()
    ],
    "nothing held and nothing timed": [
        one(
            result,
            SessionResult(
                id="s", turns=tuple(replace(t, kv_bytes=0, peak_kv_bytes=0, ttft_s=0.0) for t in session("s", 5).turns)
            ),
        )
        for result in two_policies()
    ],
}


@pytest.mark.parametrize("results", EDGE_CASES.values(), ids=EDGE_CASES.keys())
def test_unusual_results_make_a_report_and_tables_too(results: list[ReplayResult], tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", results, title="Unusual")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>Unusual</h1>" in page
    assert len(plots_of(page)) == len(session_ids(results))
    for session_id in session_ids(results):
        assert session_id in rendered(results, session_id)


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(TurnKVError, match=r"report\.html: cannot be written \(No space left on device\)"):
        write_report(path, two_policies(), title="New", answers=())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TurnKVError, match="at least one result"):
        write_report(tmp_path / "report.html", [], title="Nothing")


@pytest.mark.parametrize(("do_both_drop", "num_columns"), [(False, 86), (True, 92)])
def test_two_policies_fit_into_a_terminal_and_nothing_is_cut(do_both_drop: bool, num_columns: int) -> None:
    both_drop = [one(result, session("s", 200, high=5, low=4)) for result in two_policies()]
    chosen = both_drop if do_both_drop else two_policies()
    for plain, session_id in ((chosen, session_id) for session_id in session_ids(chosen)):
        names = ("a-policy-of-long-name", "b" * 40)
        results = [replace(result, policy=name) for result, name in zip(plain, names, strict=True)]
        wide, narrow = (rendered(results, session_id, width=width) for width in (140, num_columns))
        rows = [line.rstrip() for line in wide.splitlines() if re.match(r"(\d+ |all|ratio)", line)]
        assert len(rows) >= 2
        for row in rows:
            assert len(row) <= num_columns
            assert row in narrow


def test_the_table_shows_the_first_request_the_last_and_those_with_drops() -> None:
    comparison = compare(two_policies(), "refactor-the-parser")
    rows = sampled_requests(comparison)
    drops = [i for i, request in enumerate(comparison.runs[1].session.turns) if request.dropped_turns]
    assert rows == sorted(set(rows))
    assert {0, 63, *drops} <= set(rows)
    assert 12 <= len(rows) <= 18


def test_drops_at_every_request_do_not_flood_the_table() -> None:
    results = [one(result, session("s", 200, high=4, low=4)) for result in two_policies()]
    assert len(sampled_requests(compare(results, "s"))) <= 18


def test_the_table_ends_with_totals_and_ratios_to_the_first_policy() -> None:
    full, window = (result.sessions[0].turns for result in two_policies())
    text = rendered(two_policies(), "refactor-the-parser")
    peak = max(request.kv_bytes for request in window)
    ratio = peak / max(request.kv_bytes for request in full)
    assert re.search(rf"all .* {peak / 1e6:.0f} ", text)
    assert f"{ratio:.2f}×" in text
    assert f"{sum(request.computed_tokens for request in full):,}" in text


def test_markup_in_a_session_id_is_text_in_the_table() -> None:
    results = [one(result, session("[red]x[/nope]", 3)) for result in two_policies()]
    assert "[red]x[/nope]" in rendered(results, "[red]x[/nope]")


def test_a_session_that_no_result_has_is_refused_by_name() -> None:
    with pytest.raises(TurnKVError, match="no result has a session 'gone'; the results have refactor-the-parser, "):
        comparison_table(two_policies(), "gone")


def halving(full_bytes: int, window_bytes: int, **options: Any) -> str:
    results = [
        one(
            result, SessionResult(id="s", turns=(replace(session("s", 1).turns[0], kv_bytes=size, peak_kv_bytes=None),))
        )
        for result, size in zip(two_policies(), (full_bytes, window_bytes), strict=True)
    ]
    return claim_line(results[0], results[1], session_id="s", **options)


def test_the_claim_is_answered_by_the_ratio_of_the_peaks() -> None:
    assert "Yes: its peak is 0.50 of full's (50.0 MB of 100 MB)" in halving(100_000_000, 50_000_000)
    assert "No: its peak is 0.50 of full's" in halving(100_000_000, 50_000_001)
    assert "and 0.44 without the 10.0 MB" in halving(100_000_000, 50_000_000, fixed_kv_bytes=10_000_000)
    assert "a window of 12 turns" in halving(2, 1, window_turns=12)


def test_a_claim_that_cannot_be_checked_is_unknown() -> None:
    assert "Unknown" in halving(0, 0)
    assert "Unknown" in claim_line(*two_policies(), session_id="empty")
    assert "over the 41 requests that both answered" in claim_line(*two_policies(), session_id="support-desk-week")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (58_340_000, "58.3 MB"), (2_500_000_000, "2.50 GB")],
)
def test_bytes_are_written_with_three_digits_and_a_unit(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


def test_a_ratio_to_nothing_and_a_difference_of_nothing_are_written_as_such() -> None:
    assert ratio_text(3, 0) == "–"
    assert difference_text(None) == "–"
    assert difference_text(-0.0204) == "−0.020"
    assert difference_text(0.0001) == "±0.000"


def test_turn_numbers_in_a_row_are_drawn_together() -> None:
    assert ranges_text([3, 4, 5, 6, 8]) == "3–6, 8"
    assert ranges_text([]) == ""
