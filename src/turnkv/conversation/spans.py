"""Span classes: which tokens of a message are numbers, code, calls or reasoning, so that a policy can spare them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnkv.types import Role, SpanClass

_RANKS = (SpanClass.TEXT, SpanClass.REASONING, SpanClass.NUMBER, SpanClass.CODE, SpanClass.TOOL_CALL)
"""Where classes meet inside one token, the later one has it."""

_UNITS = (
    r"[%％‰℃]|°[CF]?|[kmcµ]?g|[kmcµn]?m|m[l²³]|lbs?|oz|ft|mi|miles?|[kKMGT]i?[Bb](?:ps|it/s)?|[kKMB]|[mµn]?s|h|hrs?|"
    r"min|[kMG]?Hz|[kM]?W|[mk]?V|mA?h?|fps|px|pt|[ap]m|[ap]\.m\.|[AP]M|USD|EUR|GBP|CNY|RMB|x|st|nd|rd|th|"
    r"percent|(?:hour|minute|second|day|week|month|year|night|dollar|cent|euro)s?|thousand|[mb]illion"
)
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|"
    r"Nov(?:ember)?|Dec(?:ember)?)(?![A-Za-z])\.?"
)
_YEAR = r"(?:,?\s(?:19|20)[0-9]{2}(?![0-9]))"

_NUMERAL = "零〇一二两三四五六七八九十百千万亿"
_MEASURE = (
    "(?:小时|公里|公斤|公分|千克|千米|千瓦|毫米|毫升|平方|平米|美元|欧元|英镑|英里|刻钟|"
    "[元块月日号点分秒岁天周米克斤吨升度折楼层页章期届人位个张条件本间次倍名台辆家种年份班晚夜套只瓶杯项笔])"
)
"""What makes a Chinese numeral a count. 一 is left out before most of them, where it says "a" or is part of a word."""

# Every repetition below is possessive or cannot overlap what follows it, and what may start inside a run of like
# characters is anchored to the run's start: so the time is linear in the text whatever it holds.
_NUMBER = re.compile(
    rf"""
      (?<![A-Za-z]){_MONTH}\s(?:[0-9]{{1,2}}(?:st|nd|rd|th)?(?![0-9A-Za-z]){_YEAR}?|(?:19|20)[0-9]{{2}}(?![0-9]))
    | (?<![A-Za-z0-9_])[0-9]{{1,2}}(?:st|nd|rd|th)?\s(?:of\s)?{_MONTH}{_YEAR}?           # 15 May 2024
    | (?:[$€£¥￥₹]\s?)?[+\-−±~≈]?(?<![A-Za-z0-9_])[0-9０-９]++(?:[.,:/'’_×–．：\-][0-9０-９]++)*+   # $1,234.5  10:30
      (?:[eE][+\-]?[0-9]++(?!\w)|T[0-9:.]++(?:Z|[+\-][0-9:]++)?)?                        # 1e-5  2024-05-15T10:30:00Z
      (?:[\s\-]?(?:{_UNITS})(?![A-Za-z])|\s?(?:{_MEASURE}|[圆角]))?
    | (?<![{_NUMERAL}])(?!一点一|十分(?!之))[{_NUMERAL}]++(?:分之|点)[{_NUMERAL}]++(?:点[{_NUMERAL}]++)?  # 百分之十
    | [一二两三四五六七八九][十百千万亿][{_NUMERAL}]*+(?:[多余几]?\s?{_MEASURE})?        # 三百  五十多个
    | (?<![{_NUMERAL}半])(?!万一)[{_NUMERAL}半]{{2,}}+[多余几]?\s?{_MEASURE}                       # 二〇二四年  十二个
    | (?!十分(?!钟)|四周)[零〇二两三四五六七八九十]{_MEASURE}                            # 两个  五月
    | 一[元月号日岁折楼]
    | 第[{_NUMERAL}0-9]++
    | (?:周|星期|礼拜)[一二三四五六日天](?![次直定])
    """,
    re.VERBOSE,
)

_CODE = re.compile(
    rf"""
      ```.*?(?:```|\Z)                                                             # fenced
    | `[^`\n]+`                                                                    # inline
    | (?<![A-Za-z])(?:(?:https?|ftp|file|s3|wss?)://|www\.)[^\s"'<>()\[\]\u3000-\u9fff\uff00-\uffef]+(?<![.,;:!?])
    | (?<![\w.+\-])[\w.+\-]++@[\w\-]++(?:\.[\w\-]++)++
    | (?<![\w/.<\u4e00-\u9fff])(?:~|\.{{1,2}})?/[\w.\-@+]++(?:/[\w.\-@+]++)*+/?    # /usr/lib  ./run
    | (?<![\w/.<])/[\w.\-@+]++(?:/[\w.\-@+]++)++/?                                 # 打开/usr/lib
    | (?<![\w/.\-])[\w.\-]+(?:/[\w.\-]+)*\.
      (?:py|js|ts|json|toml|ya?ml|md|txt|c|cc|cpp|h|hpp|rs|go|java|sh|cfg|ini|html?|css|csv|sql|xml|lock|log|ipynb)\b
    | [A-Za-z]:\\[\w\\.\-]++
    | \bv?[0-9]++\.[0-9]++\.[0-9]++(?:[.\-+]?\w++)*+ | \bv[0-9]++(?:\.[0-9]++)++   # versions
    | (?<![\w.])[A-Za-z_]\w*+(?:\.\w++)*+\(\)                                      # call()
    | (?<![\w\-])(?![0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}T)(?![0-9]+(?:{_UNITS})?(?:-[0-9]+(?:{_UNITS})?)*(?![\w\-]))
      (?![0-9]++(?:[eE][+\-]?[0-9]++|Z)(?!\w))(?=[A-Za-z0-9\-]*?(?:[A-Za-z][0-9]|[0-9][A-Za-z]))
      [A-Za-z0-9]++(?:-[A-Za-z0-9]++)*+(?!\w|["']\s*:)                             # HAT001  gpt-4o, but no JSON key
    | (?<![\w\-])[A-Z]{{2,}}+(?:-[0-9]++)++(?!\w)                                  # ORD-2024-001
    | (?<=["'])(?=[\w\-]*?[0-9]{{3}})(?=[\w\-]*?[A-Za-z_])[\w\-]++(?=["'])         # ids as JSON keys
    | (?<![\w\-])[0-9a-fA-F]{{8}}-(?:[0-9a-fA-F]{{4}}-){{3}}[0-9a-fA-F]{{12}}
    | (?<!\w)_*+[A-Za-z0-9]++_++[A-Za-z0-9]\w*+(?!["']\s*:) | (?<!\w)__[a-z]++__   # snake_case, but no JSON key
    | \b[a-z]++[A-Z]\w*+(?!["']\s*:)                                               # camelCase
    | \b(?!Ma?c[A-Z])(?:[A-Z][a-z0-9]++){{2,}}+\b(?!["']\s*:)                      # PascalCase
    | (?<=["'])[A-Z][A-Z0-9\-]{{1,9}}(?=["'])(?!["']\s*:)                          # "JFK"
    | \#[A-Za-z]*+[0-9][\w\-]*+
    | (?<=[:\[,{{])[^\S\n]*+(?:true|false|null|None|True|False)(?=\s*+(?:[,}}\]]|\Z)|[^\S\n]*+\n)
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, stop)` of one message that are of one class."""

    start: int
    stop: int
    role: Role
    span_class: SpanClass


class Classifier:
    """Finds what is a number or code in plain text, by patterns for English, Chinese and JSON."""

    def __init__(self, extra: Mapping[SpanClass, Sequence[str]] | None = None) -> None:
        """Add the user's own regular expressions, by the class of what they match; they win over the built-in ones."""
        self._extra = [
            (_RANKS.index(span_class), re.compile(pattern))
            for span_class, patterns in (extra or {}).items()
            for pattern in patterns
        ]

    def ranks(self, text: str, below: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """The class of each character, as a rank: the user's patterns over code over number over what is `below`."""
        found = np.zeros(len(text), dtype=np.uint8) if below is None else below.copy()
        for rank, pattern in ((2, _NUMBER), (3, _CODE), *self._extra):
            for match in pattern.finditer(text):
                found[match.start() : match.end()] = rank
        return found

    def classify(self, text: str) -> list[tuple[int, int, SpanClass]]:
        """The ranges of characters that are no mere text, in order."""
        return [
            (start, stop, span_class)
            for start, stop, span_class in runs(self.ranks(text))
            if span_class is not SpanClass.TEXT
        ]


class TokenTexts:
    """What each token of a vocabulary says, in bytes, so that tokens find their place in a text without a decoder."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = backend is not None and "ByteLevel" in f"{backend.decoder}{backend.pre_tokenizer}"
        self.bytes_of = cache(self._bytes_of)

    def place(self, tokens: Sequence[int]) -> tuple[str, NDArray[np.int64], NDArray[np.int64]]:
        """The text of tokens, and the first and last character that each has a part in (last < first: none)."""
        parts = [self.bytes_of(token) for token in tokens]
        raw = b"".join(parts)
        # A reply may be cut inside a character: each byte that belongs to none stands as one of its own.
        text = raw.decode("utf-8", "surrogateescape")
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        is_byte = (points >= 0xDC80) & (points <= 0xDCFF)
        widths = np.where(is_byte, 1, 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000))
        character = np.repeat(np.arange(len(text)), widths)
        stops = np.cumsum([len(part) for part in parts], dtype=np.int64)
        starts = stops - [len(part) for part in parts]
        character = np.append(character, len(text))
        if not parts:
            return "", np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        return text, character[starts], np.where(stops > starts, character[stops - 1], character[starts] - 1)

    def added(self, tokens: Sequence[int]) -> list[int]:
        """Indices of tokens that were added to the vocabulary: those that templates write, as a rule."""
        return [index for index, token in enumerate(tokens) if token in self._added]

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token]).encode()
        said: str | None = self._tokenizer.convert_ids_to_tokens(token)
        if said is None:  # models have room for more tokens than the vocabulary holds
            return b""
        if self._is_byte_level:
            return b"".join(_BYTES[each] if each in _BYTES else each.encode() for each in said)
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", said):
            return bytes([int(said[3:5], 16)])
        return said.replace("▁", " ").encode()


def spans_of(classes: Sequence[tuple[int, int, SpanClass]], role: Role) -> tuple[Span, ...]:
    """Ranges of tokens as spans of a message."""
    return tuple(Span(start, stop, role, span_class) for start, stop, span_class in classes)


def token_ranks(
    ranks: NDArray[np.uint8], text: str, first: NDArray[np.int64], last: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """The class of each token: the highest of its characters that are no white space; of such alone, the lowest."""
    if not len(first):
        return np.empty(0, dtype=np.uint8)
    is_space = np.fromiter(map(str.isspace, text), dtype=bool, count=len(text))
    weighed = np.append(np.where(is_space & (ranks != _RANKS.index(SpanClass.TOOL_CALL)), 0, ranks), np.uint8(0))
    at = np.minimum(first, len(text))
    highest = np.maximum.reduceat(weighed, at)
    highest = np.maximum(highest, weighed[np.clip(last, 0, len(text))])
    return np.where(last >= first, highest, 0).astype(np.uint8)


def runs(ranks: NDArray[np.uint8]) -> list[tuple[int, int, SpanClass]]:
    """Runs of one class, which partition what is given."""
    if not len(ranks):
        return []
    cuts = np.flatnonzero(np.diff(ranks)) + 1
    edges = [0, *cuts.tolist(), len(ranks)]
    return [(start, stop, _RANKS[ranks[start]]) for start, stop in pairwise(edges)]


def rank_of(span_class: SpanClass) -> int:
    """The number that stands for a class in arrays."""
    return _RANKS.index(span_class)


def _byte_table() -> dict[str, bytes]:
    """How byte-level vocabularies write each byte: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTES = _byte_table()
