"""Grammars: replies that can only be what is asked for, by llguidance's masks over the vocabulary."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from torch import Tensor

from turnkv.errors import InvalidMessagesError


class Grammars:
    """Makes constraints for one model's vocabulary, which is read once."""

    def __init__(self, tokenizer: Any, num_logits: int) -> None:
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=num_logits)

    def calls(self, tools: Sequence[dict[str, object]]) -> "Constraint":
        """Replies that call one or several of these tools in the Hermes form, and say nothing else.

        Raises:
            InvalidMessagesError: a tool's parameters are no schema that can be followed.
        """
        blocks = [_call_schema(tool) for tool in tools]
        body = json.dumps({"anyOf": blocks, "x-guidance": {"whitespace_flexible": False, **_SEPARATORS}})
        return self.of(f'start: call ("\\n" call)*\ncall: "<tool_call>\\n" body "\\n</tool_call>"\nbody: %json {body}')

    def of(self, lark: str) -> "Constraint":
        """Replies of a grammar in llguidance's Lark form.

        Raises:
            InvalidMessagesError: the grammar is none.
        """
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(lark))
        if matcher.is_error():
            raise InvalidMessagesError(
                f"cannot be followed: {matcher.get_error()}", remedy="simplify the schema", field="tools"
            )
        return Constraint(matcher, self._tokenizer.vocab_size)


class Constraint:
    """Where one reply stands in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def masked(self, logits: Tensor) -> Tensor:
        """Logits [V] with -inf for every token that cannot come next; a finished reply can only end."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits[: self._vocab_size].astype(bool))
        return logits.float().cpu().masked_fill(~allowed[: len(logits)], -torch.inf)

    def accept(self, token: int) -> None:
        """Go on by a token that `masked` allowed."""
        accepted = self._matcher.consume_token(token)
        assert accepted, self._matcher.get_error()


_SEPARATORS = {"item_separator": ", ", "key_separator": ": "}


def _call_schema(tool: dict[str, object]) -> dict[str, object]:
    function = tool["function"]
    assert isinstance(function, dict)
    arguments = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
