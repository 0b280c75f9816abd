"""Text to tokens, so that what a message says can never become the structure that the template writes."""

import re
from collections.abc import Mapping
from typing import Any

_START, _STOP = "\ufdd0", "\ufdd1"
"""Set around control tokens in messages. Unicode noncharacters, so no text holds them; if one does, it is lost."""

_MARKED = re.compile(f"{_START}([^{_START}{_STOP}]*){_STOP}|[{_START}{_STOP}]")


class Encoder:
    """A tokenizer, and the control tokens that only its template may write.

    These are its special tokens and those further added tokens that the template names (`<tool_call>` in Qwen2.5).
    Other added tokens are ordinary text (`<table>` and runs of newlines in Gemma).
    """

    def __init__(self, tokenizer: Any, control_text: str) -> None:
        self._tokenizer = tokenizer
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        specials = {text for text, is_special in added.items() if is_special} | set(tokenizer.all_special_tokens)
        control = specials | {text for text in added if text.strip() and text in control_text}
        self.specials = _any_of(specials)
        self._control = _any_of(control)
        self._control_ids = frozenset(tokenizer.convert_tokens_to_ids(sorted(control)))

    def mark(self, value: Any, *, is_reply: bool = False) -> Any:
        """Return text, or JSON holding text, with its control tokens marked, so that `encode` takes them as text.

        In a reply only special tokens are marked: a model may write `<think>` itself, and then means it.
        """
        if isinstance(value, str):
            control = self.specials if is_reply else self._control
            return control.sub(lambda token: f"{_START}{token[0]}{_STOP}", value)
        if isinstance(value, Mapping):
            return {
                self.mark(name, is_reply=is_reply): self.mark(item, is_reply=is_reply) for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mark(item, is_reply=is_reply) for item in value]
        return value

    def encode(self, text: str, left: str = "") -> list[int]:
        """Tokenise text that follows `left`, whose tokens are not returned.

        Tokenisers of the SentencePiece kind set a space before what they take for the start of a text. So `left` is
        tokenised too and taken off again, unless the two would share a token.
        """
        tokens: list[int] = []
        position = 0
        for marked in _MARKED.finditer(text):
            tokens += self._piece(text[position : marked.start()], left)
            tokens += self._as_text(marked[1] or "")
            position, left = marked.end(), "\n"
        return tokens + self._piece(text[position:], left)

    def common_prefix(self, one: str, other: str) -> str:
        """Return what two renderings share at their start, never part of a special token."""
        pairs = enumerate(zip(one, other, strict=False))
        cut = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
        for text in (one, other):
            for token in self.specials.finditer(text, max(0, cut - 100)):
                if token.start() >= cut:
                    break
                if cut < token.end():
                    cut = token.start()
        return one[:cut]

    def blank_marked(self, text: str) -> str:
        """Return text of the same length without what is marked, so that only the template's own tokens are left."""
        return _MARKED.sub(lambda marked: " " * len(marked[0]), text)

    def has_special(self, text: str) -> bool:
        """Say whether the text holds a special token."""
        return self.specials.search(text) is not None

    def _piece(self, text: str, left: str) -> list[int]:
        if not text:
            return []
        before = self._ids(left) if left else []
        tokens = self._ids(left + text)
        if tokens[: len(before)] == before:
            return tokens[len(before) :]
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        out = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return list(out["input_ids"])

    def _as_text(self, token: str) -> list[int]:
        """Tokenise a control token's text as plain text: cut in two, no tokenizer recognises it."""
        for pieces in ([token[:1], token[1:]], list(token)):
            ids = [token_id for piece in pieces for token_id in self._piece(piece, "\n")]
            if not self._control_ids.intersection(ids):
                break
        return [token_id for token_id in ids if token_id not in self._control_ids]


def _any_of(texts: set[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
