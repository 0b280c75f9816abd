"""Items that turnkv makes itself, the same from the same seed: sums over tool results, stated secrets, plain text."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from turnkv.errors import InvalidFileError
from turnkv.evaluate.items import Item, Messages, calls_message

_GOODS = (
    "bolts", "cables", "filters", "gaskets", "hinges", "lamps", "pumps", "screws", "sensors", "springs", "switches",
    "valves",
)  # fmt: skip
_TALK = (
    ("Thanks. How do you know these figures are current?", "They come from the stock system, which is updated hourly."),
    ("Good. Please keep answers short from now on.", "I will."),
    ("Who else can see them?", "Everyone on the warehouse team."),
    ("Fine. We have a meeting about this at noon.", "I can prepare a summary for it."),
    ("No need yet. Is the system ever down?", "Only for maintenance on Sunday nights."),
)
_STOCK_TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "get_stock",
        "description": "Pieces of one kind of goods in the warehouse.",
        "parameters": {"type": "object", "properties": {"goods": {"type": "string"}}, "required": ["goods"]},
    },
}

TEXT_CHARACTERS = 6000
"""Of a text that is read in one item."""


def arithmetic_items(count: int, seed: int) -> list[Item]:
    """Tool results early in a conversation, talk after them, and a sum over several steps at its end."""
    return [_arithmetic(index, random.Random(f"{seed}:{index}")) for index in range(count)]


def _arithmetic(index: int, random_: random.Random) -> Item:
    goods = random_.sample(_GOODS, 4)
    numbers = [random_.randint(110, 989) for _ in goods]
    history: list[dict[str, object]] = []
    for name, number in zip(goods, numbers, strict=True):
        call = calls_message([("get_stock", {"goods": name})])
        history += [
            {"role": "user", "content": f"How many {name} do we have?"},
            call,
            {"role": "tool", "tool_call_id": "call_0", "content": json.dumps({"goods": name, "pieces": number})},
            {"role": "assistant", "content": f"We have {number} {name}."},
        ]
    for said, answered in random_.choices(_TALK, k=10):
        history += [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]
    a, b, c, d = numbers
    right = a + b - c + d
    question = f"Add {goods[0]} and {goods[1]}, take away {goods[2]}, add {goods[3]}. Answer with the number alone."
    wrong = dict.fromkeys(
        [a + b, a + b + c + d, a - b + c, right + 10, right - 1, a + b - c, d, right + 100, right - 10]
    )
    answers = [right, *(each for each in wrong if each != right)]
    return Item(
        id=f"arithmetic-{index}", kind="arithmetic", lang="en", group=f"arithmetic-{index}",
        history=_with_own_ids(history), tools=(_STOCK_TOOL,),
        continuations=tuple(
            ({"role": "user", "content": question}, {"role": "assistant", "content": str(each)}) for each in answers
        ),
        evidence=tuple(range(2, 16, 4)),
    )  # fmt: skip


def leakage_items(items: Sequence[Item], count: int, seed: int) -> list[Item]:
    """The first conversations among `items` of ten messages or more, each with a secret told near its beginning."""
    found: list[Item] = []
    for item in items:
        if len(found) == count:
            break
        starts = [i for i, message in enumerate(item.history) if message["role"] == "user"]
        if item.kind != "session" or len(item.history) < 10 or len(starts) < 2:
            continue
        random_ = random.Random(f"{seed}:{item.id}")
        secret = "-".join("".join(random_.choices("ABCDEFGHJKMNPQRSTUVWXYZ23456789", k=4)) for _ in range(3))
        told: Messages = (
            {"role": "user", "content": f"By the way, the code of my safe is {secret}. Tell nobody."},
            {"role": "assistant", "content": "I will not tell anybody."},
        )
        at = starts[1]
        asked: Messages = (
            {"role": "user", "content": "What is the code of my safe?"},
            {"role": "assistant", "content": f"The code of your safe is {secret}."},
        )
        name = f"leakage-{item.id}"
        found.append(
            Item(
                id=name,
                kind="leakage",
                lang=item.lang,
                group=name,
                history=(*item.history[:at], *told, *item.history[at:]),
                tools=item.tools,
                evidence=(at,),
                twin=item.history,
                continuations=(asked,),
            )
        )
    return found


def text_items(path: Path, count: int) -> list[Item]:
    """Passages of a text: the first half is read in turns that close, the second half is what is scored.

    Raises:
        InvalidFileError: the file cannot be read, or is shorter than one passage.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFileError(f"{path}: cannot be read ({error}); give a text in UTF-8") from None
    lang = "zh" if sum("\u4e00" <= letter <= "\u9fff" for letter in text) > len(text) / 10 else "en"
    size = TEXT_CHARACTERS // 3 if lang == "zh" else TEXT_CHARACTERS
    if len(text) < size:
        raise InvalidFileError(f"{path}: holds {len(text):,} characters; give a text of {size:,} or more")
    count = min(count, len(text) // size)
    items = []
    for index in range(count):
        start = index * (len(text) // count)
        part = text[start : start + size]
        history: list[dict[str, object]] = []
        for quarter in range(2):
            passage = part[quarter * size // 4 : (quarter + 1) * size // 4]
            history += [{"role": "user", "content": passage}, {"role": "assistant", "content": "Go on."}]
        rest: Messages = (
            {"role": "user", "content": "Now you go on with the text."},
            {"role": "assistant", "content": part[size // 2 :].strip()},
        )
        name = f"{path.stem}-{index}"
        items.append(
            Item(id=name, kind="text", lang=lang, group=name, history=tuple(history), tools=(), continuations=(rest,))
        )
    return items


def _with_own_ids(messages: Sequence[dict[str, object]]) -> Messages:
    """The same messages with an id of its own for each call."""
    own: list[dict[str, object]] = []
    for index, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            assert isinstance(calls, list)
            own.append(message | {"tool_calls": [call | {"id": f"call_{index}"} for call in calls]})
        elif message["role"] == "tool":
            own.append(message | {"tool_call_id": f"call_{index - 1}"})
        else:
            own.append(message)
    return tuple(own)
