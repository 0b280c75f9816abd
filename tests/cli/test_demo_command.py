"""`turnkv demo`: by the tiny model on a session of its size, and once by the default model end to end."""

from pathlib import Path

import pytest
from tests.cli.conftest import session_line, write_sessions

from turnkv.cli import demo
from turnkv.cli.options import Dtype, EngineOptions
from turnkv.engine.journal import load_journal
from turnkv.evaluate.replay import replay
from turnkv.evaluate.results import ReplayResult
from turnkv.evaluate.sessions import RecordedSession, load_sessions


@pytest.fixture
def options(tiny_model_folder: Path, narrow_policy: Path) -> EngineOptions:
    """The tiny model under a policy that soon drops."""
    return EngineOptions(
        model=str(tiny_model_folder), policy=str(narrow_policy), dtype=Dtype.FLOAT32, budget="64MiB", threads=None
    )


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedSession:
    """Takes the place of the demonstration session."""
    [session] = load_sessions(write_sessions(tmp_path / "s.jsonl", [session_line("tiny-talk", 8)]))
    monkeypatch.setattr(demo, "example_session", lambda session_id: session)
    return session


def test_a_demo_prints_the_comparison_and_writes_its_files(
    options: EngineOptions, session: RecordedSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    demo.run_demo(options, out=out, session_id=session.id, is_quick=False)
    shown = capsys.readouterr().out
    assert "Session tiny-talk" in shown
    assert "Does a window of 1 turns halve the KV memory of tiny-talk?" in shown
    assert "that may not be dropped" in " ".join(shown.split())
    assert "Token account" in shown
    assert shown.count("recorded  ok") == 3
    for name in ("full", "narrow"):
        assert len(ReplayResult.read_json(out / f"{name}.json").sessions[0].turns) == 8
        assert load_journal(out / f"{name}.journal.jsonl")
    assert "hi 7" in (out / "report.html").read_text("utf-8")


def test_asking_beside_a_replay_leaves_its_figures_alone(
    options: EngineOptions, session: RecordedSession, tmp_path: Path
) -> None:
    demo.run_demo(options, out=tmp_path, session_id=session.id, is_quick=False)
    engine = options.load_engine(lambda line: None)
    alone = replay(engine, [session])
    asked = ReplayResult.read_json(tmp_path / "narrow.json")
    for one, other in zip(alone.sessions[0].turns, asked.sessions[0].turns, strict=True):
        assert one.to_json() | {"ttft_s": 0} == other.to_json() | {"ttft_s": 0}


@pytest.mark.default_model
def test_the_quick_demo_of_the_default_model_runs_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = EngineOptions(model=None, policy="window", dtype=Dtype.BFLOAT16, budget="2GiB", threads=None)
    demo.run_demo(options, out=tmp_path, session_id="checkout-incident", is_quick=True)
    shown = capsys.readouterr().out
    assert "Session checkout-incident" in shown
    assert "Does a window of 8 turns halve the KV memory of checkout-incident?" in shown
    assert "What went out this morning?" in shown or "Roll it back." in shown
    for name in ("full", "window"):
        assert len(ReplayResult.read_json(tmp_path / f"{name}.json").sessions[0].turns) == 12
        assert load_journal(tmp_path / f"{name}.journal.jsonl")
    assert (tmp_path / "report.html").stat().st_size > 10**6
