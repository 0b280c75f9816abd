"""Span classes, by patterns in text and token by token."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conversation.templates import FAMILIES
from tests.families import tiny_tokenizer

from turnkv.conversation.messages import Message, ToolCall, parse_messages
from turnkv.conversation.rendering import Renderer
from turnkv.conversation.spans import Classifier, TokenTexts
from turnkv.types import Role, SpanClass

NUMBER, CODE = SpanClass.NUMBER, SpanClass.CODE
RENDERER = Renderer(tiny_tokenizer())


def found(text: str, span_class: SpanClass, classifier: Classifier | None = None) -> list[str]:
    ranges = (classifier or Classifier()).classify(text)
    return [text[start:stop].strip() for start, stop, own in ranges if own is span_class]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("It costs $1,234.50 in total.", ["$1,234.50"]),
        ("Down by 3.5% since 2024-05-01 at 10:30 pm.", ["3.5%", "2024-05-01", "10:30 pm"]),
        ("Call +1-555-123-4567 or wait 20 min.", ["+1-555-123-4567", "20 min"]),
        ("It is -4 °C, 12 km away.", ["-4 °C", "12 km"]),
        ("预订三百元的酒店，5月3日入住", ["三百元", "5月3日"]),
        ("价格是１２８元，第二天上午10点", ["１２８元", "第二", "10点"]),
        ("五月有二十三个人", ["五月", "二十三个"]),
        ('{"adults": 2, "price": 99.5}', ["2", "99.5"]),
        ("Born May 15, 1990; due 3rd of June, paid in Sept. 2024.", ["May 15, 1990", "3rd of June", "Sept. 2024"]),
        ("Sent at 2024-05-15T10:30:00Z, error 1e-5.", ["2024-05-15T10:30:00Z", "1e-5"]),
        ("The 12km run at 10am took 3 hours on its 2nd day", ["12km", "10am", "3 hours", "2nd"]),
        ("Pay ¥88 or HK$ 1,000, off by -3 or ±0.5%.", ["¥88", "$ 1,000", "-3", "±0.5%"]),
        ("增长百分之十五，占三分之一", ["百分之十五", "三分之一"]),
        ("二〇二四年五月，周五下午三点，两位成人", ["二〇二四年五月", "周五", "三点", "两位"]),
        ("等了三十多分钟和十分钟，花了两百", ["三十多分", "十分", "两百"]),
        ("涨了２．５％，到１２：３０", ["２．５％", "１２：３０"]),
    ],
)
def test_numbers_are_found_with_their_separators_and_units(text: str, numbers: list[str]) -> None:
    assert found(text, NUMBER) == numbers


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Change flight HAT136 of reservation 4WQ150.", ["HAT136", "4WQ150"]),
        ("id 123e4567-e89b-12d3-a456-426614174000 here", ["123e4567-e89b-12d3-a456-426614174000"]),
        ("commit d41d8cd98f00b204e9800998ecf8427e", ["d41d8cd98f00b204e9800998ecf8427e"]),
        ("see src/turnkv/cache/pages.py and /usr/lib/x", ["src/turnkv/cache/pages.py", "/usr/lib/x"]),
        ("run `make test` now", ["`make test`"]),
        ("use get_user_details or getUserName()", ["get_user_details", "getUserName()"]),
        ("mail a.b@c.org, read https://x.io/a?b=1 please", ["a.b@c.org", "https://x.io/a?b=1"]),
        ("before\n```py\nx = 1\n```\nafter", ["```py\nx = 1\n```"]),
        ("an open fence ```x = 1", ["```x = 1"]),
        ('{"origin": "JFK", "insurance": null, "is_late": true}', ["JFK", "null", "true"]),
        ("订单号 AB12345 已发货", ["AB12345"]),
        ("订单ORD-2024-001，用gpt-4o，参见https://x.io/a，谢谢", ["ORD-2024-001", "gpt-4o", "https://x.io/a"]),
        ("打开/etc/hosts，再看文件main.py", ["/etc/hosts", "main.py"]),
        ("It needs v1.2 or 3.11.7, not 2.0.0-rc1.", ["v1.2", "3.11.7", "2.0.0-rc1"]),
        ('{"gift_card_7815826": {"source": "x"}}', ["gift_card_7815826"]),
        ("See https://x.io/doc. Or www.x.org, or C:\\\\tmp.", ["https://x.io/doc", "www.x.org", "C:\\\\tmp."]),
    ],
)
def test_code_identifiers_and_literals_are_found(text: str, code: list[str]) -> None:
    assert found(text, CODE) == code


@pytest.mark.parametrize(
    "text",
    [
        "One of the best, e.g. Mr. Smith and/or his wife; either/or.",
        "- first\n- second\n* third",
        "I am not sure about it. Could you help me, please?",
        "我想要一个安静的房间，一起去看看吧。",
        "It's true that nothing is null and void.",
        '{"reservation_id": "unknown", "firstName": "Mia"}',
        "However, None of them came, and yes, true enough: True friends, null and void.",
        "Write <b>bold</b> and <br/>, sign here: ______, and _do_ it.",
        "In May or March you may march on; MacArthur and O'Neil.",
        "我十分感谢，有一点累，一块去，一年又一年，万一不行呢，千万别忘。",
        "一起看看四周，一般都一样，统一安排，和男/女无关。",
    ],
)
def test_ordinary_words_and_json_keys_are_mere_text(text: str) -> None:
    assert Classifier().classify(text) == []


WORDS = ["a", "A", "aB", "Ab", "a_", "_", "a1_", "A1-", "1a-", "1km-", "a-", "-a", "May ", "一", "十分", "一点", "第"]
MARKS = ["1", "1.", "1-", "1,", "a.", "a/", "/a", "a@", "a@a.", "www.", "`", "```", "#", "~", "$ ", ".", "-", ", ", " "]


@pytest.mark.parametrize("unit", [*WORDS, *MARKS, '"a1', "\\a"])
def test_classifying_takes_linear_time_whatever_is_repeated(unit: str) -> None:
    """No clock is read: at a quadratic rate one of these takes minutes."""
    text = unit * (200_000 // len(unit))
    assert all(0 <= start < stop <= len(text) for start, stop, _ in Classifier().classify(text))


def test_a_users_pattern_wins_over_those_built_in() -> None:
    classifier = Classifier({NUMBER: ["HAT[0-9]+"], CODE: ["secret word"]})
    assert found("HAT136 and the secret word", NUMBER, classifier) == ["HAT136"]
    assert found("HAT136 and the secret word", CODE, classifier) == ["secret word"]


def test_numbers_in_reasoning_are_such_unless_a_users_pattern_says_otherwise() -> None:
    tokenizer = FAMILIES["qwen3"].tokenizer()
    renderer = Renderer(tokenizer)
    message = Message(Role.ASSISTANT, "So be it.", reasoning="There are 4711 or 4712.")
    rendered = renderer.render((Message(Role.USER, "Hi."), message))[-1]
    spans = renderer.spans(message, rendered.tokens, Classifier({SpanClass.TEXT: ["4711"]}), rendered.header_tokens)
    texts = {
        each: "".join(str(tokenizer.decode(rendered.tokens[s.start : s.stop])) for s in spans if s.span_class is each)
        for each in SpanClass
    }
    assert texts[NUMBER].strip() == "4712"
    assert "4711" in texts[SpanClass.TEXT]
    assert "There" in texts[SpanClass.REASONING]


def said(message: Message | None, tokens: list[int], span_class: SpanClass, header: int = 0) -> str:
    spans = RENDERER.spans(message, tokens, Classifier(), header)
    tokenizer = tiny_tokenizer()
    return "".join(str(tokenizer.decode(tokens[s.start : s.stop])) for s in spans if s.span_class is span_class)


def rendered(*messages: Message) -> tuple[list[int], int]:
    last = RENDERER.render(messages)[-1]
    return list(last.tokens), last.header_tokens


def test_tokens_take_the_class_of_their_characters() -> None:
    message = Message(Role.USER, "I pay 1,234.50 for `make test` now")
    tokens, _ = rendered(message)
    assert "1,234.50" in said(message, tokens, NUMBER)
    assert said(message, tokens, CODE).replace(" ", "") == "`maketest`"
    assert "now" not in said(message, tokens, NUMBER) + said(message, tokens, CODE)


def test_a_character_that_is_spread_over_tokens_has_one_class() -> None:
    message = Message(Role.USER, "要三百元")
    tokens, _ = rendered(message)
    text, first, last = TokenTexts(tiny_tokenizer()).place(tokens)
    spans = RENDERER.spans(message, tokens, Classifier())
    classes = [span.span_class for span in spans for _ in range(span.start, span.stop)]
    places = [i for i, (a, b) in enumerate(zip(first, last, strict=True)) if "三百元" in text and b >= text.find("三")]
    inside = [i for i in places if first[i] < text.find("元") + 1]
    assert len(inside) > 3, "each of these characters is three tokens in the tiny vocabulary"
    assert {classes[i] for i in inside} == {NUMBER}


def test_a_call_is_known_by_the_messages_structure_and_what_is_said_beside_it_is_not_of_it() -> None:
    message = Message(Role.ASSISTANT, "Let me look at 12 things.", (_call(),))
    tokens, header = rendered(Message(Role.USER, "Hi."), message)
    calls = said(message, tokens, SpanClass.TOOL_CALL, header)
    assert "look" in calls
    assert "Let me" not in calls
    assert "12" in said(message, tokens, NUMBER, header)


def _call() -> ToolCall:
    raw: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"n": 7}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    return parse_messages(raw)[1].tool_calls[0]


def test_generated_tokens_need_not_be_those_of_the_rendering() -> None:
    message = Message(Role.ASSISTANT, "It is 1234 now.")
    tokens, header = rendered(Message(Role.USER, "Hi."), message)
    tokenizer = tiny_tokenizer()
    letters = [token for each in "It is 1234 now." for token in tokenizer(each, add_special_tokens=False)["input_ids"]]
    assert letters != tokens[header:]
    assert said(message, tokens[:header] + letters, NUMBER, header).strip() == "1234"


def test_a_reply_that_was_cut_inside_a_character_keeps_its_classes() -> None:
    message = Message(Role.ASSISTANT, "预订三百元的酒店", (_call(),))
    tokens, header = rendered(Message(Role.USER, "Hi."), message)
    tail = tiny_tokenizer()("饭", add_special_tokens=False)["input_ids"]
    assert len(tail) > 1, "one character is several tokens in the tiny vocabulary"
    cut = tokens + tail[:-1]
    assert said(message, cut, NUMBER, header).strip() == "三百元"
    assert "look" in said(message, cut, SpanClass.TOOL_CALL, header)
    assert "预订" not in said(message, cut, SpanClass.TOOL_CALL, header)


def test_a_token_that_the_vocabulary_lacks_says_nothing() -> None:
    text, first, last = TokenTexts(tiny_tokenizer()).place([10**6])
    assert text == ""
    assert last[0] < first[0]


@given(st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=3).map(str.encode)), max_size=12))
def test_each_token_finds_the_characters_that_it_has_a_part_in(parts: list[bytes]) -> None:
    texts = TokenTexts(tiny_tokenizer())
    texts.bytes_of = cache(parts.__getitem__)
    text, first, last = texts.place(range(len(parts)))
    raw = text.encode("utf-8", "surrogateescape")
    assert raw == b"".join(parts)
    position = 0
    for part, start, stop in zip(parts, first, last, strict=True):
        before = len(text[:start].encode("utf-8", "surrogateescape"))
        through = len(text[: stop + 1].encode("utf-8", "surrogateescape"))
        assert before <= position
        assert through >= position + len(part) or not part
        position += len(part)


@given(st.lists(st.integers(0, len(tiny_tokenizer()) - 1), max_size=60), st.integers(0, 3))
def test_spans_partition_whatever_tokens_there_are(tokens: list[int], header: int) -> None:
    for message in (None, Message(Role.USER, "x"), Message(Role.ASSISTANT, "x", (_call(),), reasoning="y")):
        spans = RENDERER.spans(message, tokens, Classifier(), min(header, len(tokens)))
        assert [index for span in spans for index in range(span.start, span.stop)] == list(range(len(tokens)))
        assert all(one.span_class is not other.span_class for one, other in pairwise(spans))
