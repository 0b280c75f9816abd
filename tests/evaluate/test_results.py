"""The JSON form of results: what is written is read back, and what is malformed is refused by name."""

import copy
import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnkv.errors import InvalidFileError, TurnKVError
from turnkv.evaluate.results import ReplayResult, RequestResult, SessionResult, Totals, write_atomically
from turnkv.types import TurnKind

FIRST = RequestResult(
    turn=0,
    kind=TurnKind.CHAT,
    prompt_tokens=100,
    computed_tokens=100,
    cached_tokens=0,
    dropped_tokens=0,
    noted_tokens=0,
    kv_bytes=1000,
    ttft_s=0.25,
    nll=2.0,
    scored_tokens=10,
)
SECOND = replace(
    FIRST,
    turn=1,
    kind=TurnKind.TOOL,
    prompt_tokens=160,
    computed_tokens=40,
    cached_tokens=100,
    dropped_tokens=20,
    kv_bytes=900,
    peak_kv_bytes=1400,
    nll=1.0,
    scored_tokens=30,
    dropped_turns=(0,),
    top1=0.5,
)
UNSCORED = replace(FIRST, nll=None, scored_tokens=0, computed_tokens=7, reply="你好 \ud83d")
RESULT = ReplayResult(
    model="tiny",
    policy="window",
    sessions=(
        SessionResult(id="a", turns=(FIRST, SECOND)),
        SessionResult(id="b", turns=(UNSCORED,), error="over the budget"),
        SessionResult(id="empty"),
    ),
    wall_s=1.5,
    mode="score",
    versions={"torch": "2.13.0"},
    settings={"dtype": "float32", "threads": 2, "window": {"high": 12, "low": 8}},
)


def test_totals_are_the_highest_peak_the_sum_and_the_mean_per_scored_token() -> None:
    assert RESULT.totals == Totals(peak_kv_bytes=1400, computed_tokens=147, nll=(2.0 * 10 + 1.0 * 30) / 40, wall_s=1.5)


def test_totals_of_nothing_are_zero_and_have_no_nll() -> None:
    nothing = replace(RESULT, sessions=())
    assert nothing.totals == Totals(peak_kv_bytes=0, computed_tokens=0, nll=None, wall_s=1.5)
    assert ReplayResult.from_json(nothing.to_json()) == nothing


def test_a_written_file_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    RESULT.write_json(path)
    assert ReplayResult.read_json(path) == RESULT


def test_the_documented_keys_are_written_in_the_documented_places() -> None:
    form = json.loads(json.dumps(RESULT.to_json()))
    assert list(form) == ["model", "policy", "mode", "versions", "settings", "sessions", "totals"]
    assert list(form["sessions"][0]) == ["id", "error", "turns"]
    assert list(form["totals"]) == ["peak_kv_bytes", "computed_tokens", "nll", "wall_s"]
    assert form["sessions"][0]["turns"][1] == {
        "turn": 1,
        "kind": "tool",
        "prompt_tokens": 160,
        "computed_tokens": 40,
        "cached_tokens": 100,
        "dropped_tokens": 20,
        "noted_tokens": 0,
        "kv_bytes": 900,
        "ttft_s": 0.25,
        "nll": 1.0,
        "scored_tokens": 30,
        "dropped_turns": [0],
        "peak_kv_bytes": 1400,
        "reply": None,
        "top1": 0.5,
    }


def test_a_file_without_the_optional_keys_is_read() -> None:
    form: dict[str, Any] = copy.deepcopy(RESULT.to_json())
    for key in ("mode", "versions", "settings"):
        del form[key]
    for key in ("dropped_turns", "peak_kv_bytes", "reply", "top1"):
        del form["sessions"][1]["turns"][0][key]
    result = ReplayResult.from_json(form)
    assert result.mode == "score"
    assert result.sessions[1].turns[0] == replace(UNSCORED, reply=None)


def set_to(value: object, *path: str | int) -> Callable[[Any], None]:
    def change(form: Any) -> None:
        for key in path[:-1]:
            form = form[key]
        form[path[-1]] = value

    return change


def without(*path: str | int) -> Callable[[Any], None]:
    def change(form: Any) -> None:
        for key in path[:-1]:
            form = form[key]
        del form[path[-1]]

    return change


TURN = ("sessions", 0, "turns", 0)
MALFORMED: list[tuple[Callable[[Any], None], str]] = [
    (without("model"), "model: is missing"),
    (without("totals"), "totals: is missing"),
    (set_to(3, "policy"), "policy: must be a string, is 3"),
    (set_to({}, "sessions"), "sessions: must be a list, is {}"),
    (set_to([3], "sessions"), "sessions[0]: must be an object, is 3"),
    (set_to(1, "versions", "torch"), "versions.torch: must be a string, is 1"),
    (set_to([], "settings"), "settings: must be an object, is []"),
    (set_to(1, "modle"), "modle: is no known field"),
    (set_to("a", "sessions", 1, "id"), "sessions[1].id: 'a' is there twice"),
    (without("sessions", 0, "error"), "sessions[0].error: is missing"),
    (set_to(False, "sessions", 0, "error"), "sessions[0].error: must be a string, is False"),
    (set_to(1, *TURN, "nnl"), "sessions[0].turns[0].nnl: is no known field"),
    (without(*TURN, "nll"), "sessions[0].turns[0].nll: is missing"),
    (set_to(float("nan"), *TURN, "nll"), "sessions[0].turns[0].nll: must be a finite number from 0, is nan"),
    (set_to(float("inf"), *TURN, "ttft_s"), "sessions[0].turns[0].ttft_s: must be a finite number from 0, is inf"),
    (set_to(10**400, *TURN, "ttft_s"), "sessions[0].turns[0].ttft_s: must be a finite number from 0, is 1000"),
    (set_to(None, *TURN, "ttft_s"), "sessions[0].turns[0].ttft_s: must be a finite number from 0, is None"),
    (set_to(0, *TURN, "scored_tokens"), "sessions[0].turns[0].nll: must be null where scored_tokens is 0"),
    (set_to(-1, *TURN, "kv_bytes"), "sessions[0].turns[0].kv_bytes: must be a whole number from 0, is -1"),
    (set_to(True, *TURN, "kv_bytes"), "sessions[0].turns[0].kv_bytes: must be a whole number from 0, is True"),
    (set_to(1.0, *TURN, "turn"), "sessions[0].turns[0].turn: must be a whole number from 0, is 1.0"),
    (set_to(2, *TURN, "turn"), "sessions[0].turns[1].turn: is 1 after 2"),
    (set_to("talk", *TURN, "kind"), "sessions[0].turns[0].kind: must be one of chat, tool, is 'talk'"),
    (set_to([-1], *TURN, "dropped_turns"), "sessions[0].turns[0].dropped_turns: must be a list of whole numbers"),
    (set_to(3, "totals"), "totals: must be an object, is 3"),
    (without("totals", "wall_s"), "totals.wall_s: is missing"),
    (set_to(1, "totals", "peak_kv_bytes"), "totals.peak_kv_bytes: is 1, but the turns give 1400"),
    (set_to(None, "totals", "nll"), "totals.nll: is None, but the turns give 1.25"),
    (set_to(1.3, "totals", "nll"), "totals.nll: is 1.3, but the turns give 1.25"),
]


@pytest.mark.parametrize(("change", "message"), MALFORMED, ids=[message.split(",")[0] for _, message in MALFORMED])
def test_a_malformed_field_is_refused_by_name(change: Callable[[Any], None], message: str) -> None:
    form = copy.deepcopy(RESULT.to_json())
    change(form)
    with pytest.raises(InvalidFileError) as caught:
        ReplayResult.from_json(form)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "must be an object, is []"),
        (b"{}", "totals: is missing"),
    ],
    ids=["empty", "no UTF-8", "too deep", "a list", "an empty object"],
)
def test_a_file_of_something_else_is_refused_with_its_path(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(InvalidFileError) as caught:
        ReplayResult.read_json(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_file_that_is_not_there_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidFileError, match=r"gone\.json: cannot be read \(No such file or directory\)"):
        ReplayResult.read_json(tmp_path / "gone.json")


def test_a_nll_that_is_not_finite_is_refused_where_it_arises() -> None:
    with pytest.raises(TurnKVError, match="turn 1: nll is nan"):
        replace(SECOND, nll=float("nan"))


def test_a_full_disk_leaves_the_old_file_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    RESULT.write_json(path)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(TurnKVError, match=r"results\.json: cannot be written \(No space left on device\)"):
        replace(RESULT, model="other").write_json(path)
    assert ReplayResult.read_json(path) == RESULT
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_place_of_the_file_is_an_error_and_stays(tmp_path: Path) -> None:
    with pytest.raises(TurnKVError, match="cannot be written"):
        write_atomically(tmp_path / ".." / tmp_path.name, "text")
    (tmp_path / "file").write_text("")
    with pytest.raises(TurnKVError, match="cannot be written"):
        write_atomically(tmp_path / "file" / "below", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_written_file_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    write_atomically(tmp_path / "written", "text")
    assert stat.S_IMODE((tmp_path / "written").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
