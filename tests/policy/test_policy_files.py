from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turnkv.errors import InvalidConfigError, InvalidFileError
from turnkv.policy import (
    FULL,
    Keep,
    Old,
    Policy,
    Precision,
    Window,
    load_policy,
    parse_policy,
    parse_size,
    preset_names,
)
from turnkv.types import SpanClass, Tier

WHOLE = """
[window]
high = 7
low = 3
budget = "1.5GiB"
overflow = "refuse"

[keep]
pinned = ["(?i)never forget", "^todo:"]
tool_results = "clear"
recent = 1

[precision]
exact = ["number", "role:tool"]
rest = { k = "int8", v = "int4" }
old = { after = 3, store = "int4" }
exact_layers = [0, 29]
patterns = { number = ["[A-Z]{2}\\\\d+"], code = ["SKU-.*"] }
"""


def test_every_preset_loads_and_describes_itself() -> None:
    assert set(preset_names()) == {"full", "window", "balanced", "lean"}
    for name in preset_names():
        policy = load_policy(name)
        assert policy.name == name
        assert policy.describe().startswith(f"{name}: ")


def test_the_preset_full_is_the_policy_full() -> None:
    assert load_policy("full") == FULL
    assert FULL.window is None


def test_a_file_sets_every_field(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(WHOLE, "utf-8")
    assert load_policy(str(path)) == Policy(
        name="mine",
        window=Window(high=7, low=3, budget_bytes=3 * 2**29, overflow="refuse"),
        keep=Keep(pinned=("(?i)never forget", "^todo:"), tool_results="clear", recent=1),
        precision=Precision(
            exact=("number", "role:tool"),
            rest=Tier("int8", "int4"),
            old=Old(after=3, store=Tier("int4", "int4")),
            exact_layers=(0, 29),
            patterns={SpanClass.NUMBER: (r"[A-Z]{2}\d+",), SpanClass.CODE: ("SKU-.*",)},
        ),
    )


def test_sections_and_keys_may_be_left_out() -> None:
    assert parse_policy("p", "") == Policy(name="p")
    assert parse_policy("p", "[window]") == Policy(name="p", window=Window())
    assert parse_policy("p", "[keep]\nrecent = 0").keep == Keep(recent=0)
    assert parse_policy("p", "[precision]").precision == Precision()
    assert parse_policy("p", '[precision]\nrest = "fp8"').precision == Precision(rest=Tier("fp8", "fp8"))


def test_a_preset_is_preferred_to_a_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").write_text("[window]", "utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_policy("full") == FULL


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[widow]", "widow"),
        ("[precision]\nrset = 1", "precision.rset"),
        ('[precision]\nexact = "number"', "precision.exact"),
        ('[precision]\nexact = ["numbers"]', "precision.exact[0]"),
        ('[precision]\nexact = ["number", "role:robot"]', "precision.exact[1]"),
        ("[precision]\nrest = 8", "precision.rest"),
        ('[precision]\nrest = "int3"', "precision.rest"),
        ('[precision]\nrest = { k = "int8" }', "precision.rest"),
        ('[precision]\nrest = { k = "int8", v = "int2" }', "precision.rest"),
        ('[precision]\nold = "int4"', "precision.old"),
        ("[precision]\nold = { after = 2 }", "precision.old"),
        ('[precision]\nold = { after = -1, store = "int4" }', "precision.old.after"),
        ('[precision]\nold = { after = true, store = "int4" }', "precision.old"),
        ('[precision]\nold = { after = 1, store = "int5" }', "precision.old.store"),
        ("[precision]\nexact_layers = 3", "precision.exact_layers"),
        ("[precision]\nexact_layers = [-1]", "precision.exact_layers"),
        ('[precision]\npatterns = ["a"]', "precision.patterns"),
        ('[precision]\npatterns = { numbre = ["a"] }', "precision.patterns.numbre"),
        ('[precision]\npatterns = { number = "a" }', "precision.patterns.number"),
        ('[precision]\npatterns = { number = ["a", "("] }', "precision.patterns.number[1]"),
        ("high = 3", "high"),
        ("window = 3", "window"),
        ("keep = []", "keep"),
        ("[[window]]", "window"),
        ("[window]\nhihg = 3", "window.hihg"),
        ("[window]\nbudget_bytes = 3", "window.budget_bytes"),
        ("[window]\nhigh = true", "window.high"),
        ("[window]\nhigh = 3.0", "window.high"),
        ('[window]\nhigh = "3"', "window.high"),
        ("[window]\nhigh = [3]", "window.high"),
        ("[window]\nhigh = 0", "window.high"),
        ("[window]\nhigh = -1", "window.high"),
        ("[window]\nlow = false", "window.low"),
        ("[window]\nlow = nan", "window.low"),
        ("[window]\nlow = -1", "window.low"),
        ("[window]\nhigh = 3\nlow = 4", "window.low"),
        ("[window]\nhigh = 3", "window.low"),
        ('[window]\nbudget = "2 GB of it"', "window.budget"),
        ("[window]\nbudget = true", "window.budget"),
        ("[window]\nbudget = -5", "window.budget"),
        ("[window]\nbudget = 0", "window.budget"),
        ("[window]\nbudget = inf", "window.budget"),
        ("[window]\nbudget = 2020-01-01", "window.budget"),
        ("[window]\nbudget = {}", "window.budget"),
        ('[window]\noverflow = "wrap"', "window.overflow"),
        ("[window]\noverflow = 1", "window.overflow"),
        ("[window]\noverflow = [1]", "window.overflow"),
        ("[keep]\npinnned = []", "keep.pinnned"),
        ('[keep]\npinned = "a"', "keep.pinned"),
        ("[keep]\npinned = [1]", "keep.pinned"),
        ('[keep]\npinned = ["a", "(b"]', "keep.pinned[1]"),
        ('[keep]\npinned = ["a{99999999999999999999}"]', "keep.pinned[0]"),
        ("[keep]\nrecent = -1", "keep.recent"),
        ("[keep]\nrecent = true", "keep.recent"),
        ("[keep]\nrecent = 1.5", "keep.recent"),
        ('[keep]\ntool_results = "row"', "keep.tool_results"),
        ("[keep]\ntool_results = false", "keep.tool_results"),
        ("[keep]\ntool_results = {}", "keep.tool_results"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(text: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(InvalidConfigError) as caught:
        load_policy(str(path))
    assert caught.value.field == field
    sentence = str(caught.value)
    assert sentence.startswith(f"{field} = ")
    problem, _, remedy = sentence.partition("; ")
    assert problem
    assert remedy


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        ("2GiB", 2**31),
        ("500MB", 500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("3 KiB", 3072),
        ("7kB", 7000),
        ("8MiB", 2**23),
        ("0.1GB", 100_000_000),
        ("12B", 12),
        (" 12 ", 12),
        (12, 12),
        (2**62 + 1, 2**62 + 1),
        (f"{2**53 + 1}B", 2**53 + 1),
        ("4.35kB", 4350),
    ],
)
def test_a_size_is_read_exactly(value: object, num_bytes: int) -> None:
    assert parse_size("size", value) == num_bytes


@pytest.mark.parametrize(
    "value",
    ["", "GiB", "2gib", "2GIB", "2TB?", "two", "-1", "1e9", "1,5GB", "2 G B", "0x10", True, None, -3, [2], 1e300],
)
def test_nonsense_is_no_size(value: object) -> None:
    with pytest.raises(InvalidConfigError, match=r"^size = .*: is no size; give a number of bytes"):
        parse_size("size", value)


@given(st.text(max_size=12) | st.integers() | st.floats())
@example("9" * 400 + "GiB")
def test_any_value_is_a_size_or_is_refused_by_name(value: object) -> None:
    with suppress(InvalidConfigError):
        assert parse_size("size", value) >= 0


def test_a_missing_file_is_told_with_the_presets(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none.toml"), str(tmp_path), "windows", ""):
        with pytest.raises(InvalidFileError, match=r"no preset and no file of this name; presets: .*full.*window"):
            load_policy(name)


@pytest.mark.parametrize("content", [b"window = = 3", b"[window\n", b"\xff\xfe[window]", b'high = "'])
def test_a_file_that_is_no_toml_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidFileError, match=r"broken\.toml: not TOML: .*; see docs/policies\.md"):
        load_policy(str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locked.toml"
    path.touch()

    def refuse(*_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(InvalidFileError, match=r"locked\.toml: cannot be read: Permission denied; "):
        load_policy(str(path))


def test_a_pattern_pins_wherever_it_matches() -> None:
    keep = Keep(pinned=("(?i)never forget", "^todo:"))
    assert keep.is_pinned("please NEVER forget this")
    assert keep.is_pinned("todo: tests")
    assert not keep.is_pinned("a todo: tests")
    assert not Keep().is_pinned("anything")


def test_ranks_are_gapped_or_closed() -> None:
    assert parse_policy("mine", '[window]\nranks = "closed"').window == Window(ranks="closed")
    with pytest.raises(InvalidConfigError, match=r"window\.ranks"):
        parse_policy("mine", '[window]\nranks = "wide"')


def test_a_policy_describes_its_limits() -> None:
    window = Window(high=4, low=2, budget_bytes=12_345)
    text = Policy(name="mine", window=window, keep=Keep(tool_results="clear")).describe()
    assert text == "mine: over 4 closed turns down to 2, at most 12,345 bytes, tool results clear"
