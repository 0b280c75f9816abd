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
    r"%|‰|°[CF]?|[kmcµ]?g|[kcmµn]?m|m[l²³]|lbs?|oz|ft|mi|miles?|[kKMGT]i?[Bb](?:ps|it/s)?|[mµn]?s|h|hrs?|min|"
    r"[kMG]?Hz|[kM]?W|[mk]?V|mA?h?|fps|px|pt|[ap]m|[ap]\.m\.|[AP]M|USD|EUR|GBP|CNY|RMB|x"
)
_MEASURES = "元块圆角月日号点分秒岁天周米克斤吨升度折楼层页章期届届度人位个张条件本间次倍名台辆家种年小公千毫平"

_NUMBER = re.compile(
    rf"""
      [$€£¥￥]?\s?[+\-−±~≈]?(?<![A-Za-z0-9_])[0-9０-９](?:[0-9０-９.,:/'’_×\-–]*[0-9０-９])?  # 1,234.5  10:30
      (?:\s?(?:{_UNITS})(?![A-Za-z])|\s?[{_MEASURES}])?
    | [零〇一二两三四五六七八九十百千万亿半][零〇一二两三四五六七八九十百千万亿半]+\s?[{_MEASURES}]?           # 三百元
    | [零〇一二两三四五六七八九十](?=[元块月日号点分秒岁折楼层年])[元块月日号点分秒岁折楼层年]                   # 五月
    | 第[零〇一二两三四五六七八九十百0-9]+
    """,
    re.VERBOSE,
)

_CODE = re.compile(
    r"""
      ```.*?(?:```|\Z)                                                             # fenced
    | `[^`\n]+`                                                                    # inline
    | https?://[^\s"'<>，。）)\]]+
    | [\w.+\-]+@[\w\-]+(?:\.[\w\-]+)+
    | (?<![\w/.])(?:~|\.{1,2})?/[\w.\-@+]+(?:/[\w.\-@+]+)*/?                        # /usr/lib  ./run
    | (?<![\w/.])[\w.\-]+(?:/[\w.\-]+)*\.
      (?:py|js|ts|json|toml|ya?ml|md|txt|c|cc|cpp|h|hpp|rs|go|java|sh|cfg|ini|html?|css|csv|sql|xml|lock|log|ipynb)\b
    | [A-Za-z]:\\[\w\\.\-]+
    | \bv?[0-9]+\.[0-9]+\.[0-9]+[\w.\-]*                                           # versions
    | \b[A-Za-z_]\w*(?:\.\w+)*\(\)                                                 # call()
    | (?<![\w\-])(?:[A-Za-z]+[0-9]|[0-9]+[A-Za-z])[A-Za-z0-9]*(?:-[A-Za-z0-9]+)*(?![\w\-]|["']\s*:)  # HAT001
    | (?<![\w\-])[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}
    | (?<!\w)[A-Za-z0-9]*_\w+(?!["']\s*:)\b                                        # snake_case, but no JSON key
    | \b[a-z]+[A-Z]\w*\b(?!["']\s*:) | \b(?:[A-Z][a-z0-9]+){2,}\b(?!["']\s*:)      # camelCase, PascalCase
    | (?<=["'])[A-Z][A-Z0-9\-]{1,9}(?=["'])(?!["']\s*:)                            # "JFK"
    | \#[A-Za-z]*[0-9][\w\-]*
    | (?<=[:\[,{])\s*(?:true|false|null|None|True|False)\b
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

    def ranks(self, text: str) -> NDArray[np.uint8]:
        """The class of each character, as an index into tool_call, code, number, reasoning and text from the last."""
        found = np.zeros(len(text), dtype=np.uint8)
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
        try:
            text = raw.decode("utf-8")
            character = np.cumsum((np.frombuffer(raw, dtype=np.uint8) & 0xC0) != 0x80) - 1
        except UnicodeDecodeError:  # a reply may be cut inside a character: then each byte is one
            text = raw.decode("latin-1")
            character = np.arange(len(raw))
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
        said = str(self._tokenizer.convert_ids_to_tokens(token))
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
