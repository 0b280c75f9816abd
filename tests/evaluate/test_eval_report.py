from pathlib import Path
from typing import Any

import pytest

from turnkv.evaluate.eval_report import change, value, write_eval_plots, write_eval_report

HOSTILE = "<script>alert(1)</script>"


def figure(value: float, unit: str = "nats", **own: Any) -> dict[str, Any]:
    given = {"value": value, "full": 1.0, "change": value - 1, "low": value - 1.1, "high": value - 0.9, "unit": unit}
    return given | {"items": 3, "tokens": 300} | own


def request(turn: int, loss: float) -> dict[str, Any]:
    return {
        "turn": turn,
        "num_drops": turn // 4,
        "kv_bytes": 10**6 * (turn + 1),
        "ttft_s": 0.1,
        "computed_tokens": 40,
        "nll": 1.5 + loss,
        "full_nll": 1.5,
        "kl": loss / 3,
        "tokens": 30,
        "dropped_turns": [],
        "text": f"reply {turn} {HOSTILE}",
        "worst": {"text": f"around {HOSTILE}", "token": "tok", "loss": loss * 9} if loss else None,
    }


def evaluation(*protocols: str, subjects: tuple[str, ...] = ("full", "balanced", "lean")) -> dict[str, Any]:
    items = [
        {
            "id": f"session-{number}",
            "kind": "session",
            "lang": "en",
            "protocol": protocol,
            "subjects": {
                name: {
                    "metrics": {},
                    "requests": [request(turn, 0.02 * place * turn) for turn in range(9)]
                    if protocol == "online"
                    else [],
                }
                for place, name in enumerate(subjects)
            },
        }
        for protocol in protocols
        for number in range(7)
    ]
    metrics = {
        "kv_ratio": figure(0.4, "ratio"),
        "nll": figure(1.03, "relative"),
        "kl": figure(0.02, full=0.0, change=0.02, low=0.01, high=0.03),
        "gold_ll": figure(-12.5, full=-12.0, change=-0.5, low=-0.9, high=-0.1),
        "ttft_after_drop_s": figure(0.1, "s", full=None, change=None, low=None, high=None),
    }
    summary = {protocol: dict.fromkeys(subjects, metrics) for protocol in protocols}
    return {
        "model": "tiny", "versions": {"turnkv": "1"}, "settings": {"policies": ["one", "two"], "dtype": "bfloat16"},
        "reference": "full", "subjects": list(subjects), "summary": summary, "items": items,
        "skipped": [{"where": "data.jsonl:7", "problem": HOSTILE}], "wall_s": 61.0,
    }  # fmt: skip


def test_the_page_holds_every_subject_metric_and_interval_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    write_eval_report(tmp_path / "e.html", evaluation("oneshot", "online"))
    page = (tmp_path / "e.html").read_text("utf-8")
    for said in ("balanced", "lean", "nll", "gold_ll", "ttft_after_drop_s", "+3.00% [-7.00%, +13.00%]", "data.jsonl:7"):
        assert said in page
    assert page.count("<svg") == 2
    assert "http-equiv" in page
    assert "<script" not in page
    assert "src=" not in page


def test_text_of_sessions_is_escaped_and_five_sessions_are_shown(tmp_path: Path) -> None:
    write_eval_report(tmp_path / "e.html", evaluation("online"))
    page = (tmp_path / "e.html").read_text("utf-8")
    assert HOSTILE not in page
    assert page.count("<blockquote>") == 5
    assert "furthest apart at turn 8" in page


@pytest.mark.parametrize(
    "given",
    [evaluation("oneshot"), evaluation("online", subjects=("full",)), evaluation()],
    ids=["oneshot alone", "reference alone", "nothing"],
)
def test_what_was_not_measured_is_left_out(given: dict[str, Any], tmp_path: Path) -> None:
    write_eval_report(tmp_path / "e.html", given)
    page = (tmp_path / "e.html").read_text("utf-8")
    assert ("Turn by turn" in page) == ("online" in given["summary"])
    assert ("At a glance" in page) == (len(given["subjects"]) > 1 and bool(given["summary"]))


def test_plots_are_pictures(tmp_path: Path) -> None:
    paths = write_eval_plots(tmp_path / "new", evaluation("oneshot", "online"))
    assert [path.name for path in paths] == ["pareto.png", "curves.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000


def test_figures_are_written_in_their_units() -> None:
    assert value(figure(0.25, "ratio")) == "0.250×"
    assert value(figure(0.0123, "s")) == "12 ms"
    assert change(figure(1.5, "s")) == "+500 [+400, +600]"
    assert value(None) == change(None) == "–"
    assert change(figure(1.0, change=None)) == "–"
