"""Short conversations with chat and tool turns, and an engine over a tiny model to run them."""

import json
from typing import Any

import torch
from tests.families import tiny_model, tiny_tokenizer

from turnkv.config import CacheConfig, EngineConfig
from turnkv.engine import Engine, ModelRunner
from turnkv.policy import FULL, Policy

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }
]


def call(number: int) -> dict[str, Any]:
    """An assistant message that calls a tool."""
    arguments = json.dumps({"n": number})
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
    }


def result(number: int, text: str) -> dict[str, Any]:
    """The result of that call."""
    return {"role": "tool", "tool_call_id": f"c{number}", "content": text}


def conversation(num_rounds: int, *, with_tools: bool = True) -> list[dict[str, Any]]:
    """A system message, then rounds of a question, every second one with a tool call, and an answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for number in range(num_rounds):
        messages.append({"role": "user", "content": f"What is thing {number}?"})
        if with_tools and number % 2:
            messages += [call(number), result(number, f"value {number * 37}")]
        messages.append({"role": "assistant", "content": f"It is {number * 37}."})
    return messages


def requests_of(messages: list[dict[str, Any]]) -> list[int]:
    """Indices of the assistant messages."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def tiny_engine(
    family: str = "llama",
    *,
    policy: Policy = FULL,
    step: int = 2048,
    budget_bytes: int = 32 * 2**20,
    attention: str = "auto",
    max_positions: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Engine:
    """An engine over a family's tiny model."""
    runner = ModelRunner(tiny_model(family, "turnkv", dtype), attention=attention)
    if max_positions is not None:
        runner.max_positions = max_positions
    return Engine(
        runner,
        tiny_tokenizer(),
        name=family,
        policy=policy,
        cache=CacheConfig(budget_bytes=budget_bytes),
        config=EngineConfig(max_step_tokens=step, max_new_tokens=24),
    )


def score_all(engine: Engine, messages: list[dict[str, Any]], tools: Any = None) -> tuple[Any, torch.Tensor]:
    """Score every assistant message in order; gives the last score and all logits that chose a reply's tokens."""
    rows: list[torch.Tensor] = []
    score = None
    for index in requests_of(messages):
        score = engine.score(messages[: index + 1], tools, observe=lambda logits: rows.append(logits.clone()))
        engine.check()
    return score, torch.cat(rows)


def reply_rows(engine: Engine, session_id: Any) -> tuple[list[int], list[int]]:
    """The session's whole text, and the indices in it of the tokens that its replies' logits come from."""
    tokens: list[int] = []
    rows: list[int] = []
    for record in engine.session(session_id).records:
        if record.header_tokens:
            body = len(record.tokens) - record.header_tokens
            first = len(tokens) + record.header_tokens - 1
            rows.extend(range(first, first + body))
        tokens.extend(record.tokens)
    return tokens, rows
