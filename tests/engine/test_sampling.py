import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.engine.conversations import TOOLS, conversation, tiny_engine
from torch import Tensor

from turnkv.config import SamplingParams
from turnkv.engine import Engine, Reply
from turnkv.engine.sampler import Sampler

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is it?"}]


class Spoken:
    """An engine whose model says a text, byte by byte, and then ends its reply."""

    def __init__(self, text: bytes, *, with_end: bool = True) -> None:
        self.engine = tiny_engine()
        tokenizer: Any = self.engine._tokenizer
        vocabulary = tokenizer.get_vocab()
        by_byte = {bytes([b]): vocabulary[letter] for b, letter in _byte_letters().items()}
        self.tokens = [by_byte[bytes([b])] for b in text]
        end = [vocabulary["<|im_end|>"]] if with_end else []
        script = iter([*self.tokens, *end])
        self.engine.runner.run = self._saying(script, self.engine.runner.run)  # type: ignore[method-assign]

    def _saying(self, script: Any, run: Any) -> Any:
        def scripted(storage: Any, chunks: Sequence[Any]) -> list[Tensor]:
            rows = [torch.zeros(row.shape) for row in run(storage, chunks)]
            for row in rows:
                if len(row):
                    row[-1, next(script)] = 50.0
            return rows

        return scripted

    def reply(self, **sampling: Any) -> tuple[Reply, list[str]]:
        pieces: list[str] = []
        params = SamplingParams(**({"max_new_tokens": 200} | sampling))
        reply = self.engine.respond(QUESTION, sampling=params, on_text=pieces.append)
        self.engine.check()
        return reply, pieces


def _byte_letters() -> dict[int, str]:
    """GPT-2's letters for bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def test_a_reply_ends_at_the_models_own_end_and_leaves_it_out() -> None:
    reply, pieces = Spoken(b"Two words.").reply()
    assert reply.message.content == "".join(pieces) == "Two words."
    assert reply.finish_reason == "stop"
    assert reply.usage.reply_tokens == len(reply.tokens) == 10


def test_a_reply_that_ends_at_once_is_empty() -> None:
    spoken = Spoken(b"")
    reply, pieces = spoken.reply()
    assert (reply.message.content, pieces, reply.tokens) == ("", [], ())
    spoken.engine.runner.run = tiny_engine().runner.run  # type: ignore[method-assign]
    history = [*QUESTION, reply.message.to_openai(), *QUESTION]
    assert spoken.engine.respond(history, sampling=SamplingParams(max_new_tokens=1)).session_id == reply.session_id


def test_a_reply_ends_at_its_limit_even_inside_a_character() -> None:
    spoken = Spoken("ab日".encode())
    reply, pieces = spoken.reply(max_new_tokens=4)
    assert reply.finish_reason == "length"
    assert reply.message.content == "".join(pieces) == "ab\ufffd"
    assert pieces[:2] == ["a", "b"]


def test_characters_of_several_tokens_are_sent_whole() -> None:
    reply, pieces = Spoken("a日é!".encode()).reply()
    assert pieces == ["a", "日", "é", "!"]
    assert reply.message.content == "a日é!"


@pytest.mark.parametrize("stops", [("END",), ("xx", "END"), ("END", "ND"), ("ENDLESS", "END")])
def test_a_stop_string_over_several_tokens_ends_the_reply_and_is_never_sent(stops: tuple[str, ...]) -> None:
    reply, pieces = Spoken(b"It is so. END of it").reply(stop=stops)
    assert reply.message.content == "".join(pieces) == "It is so. "
    assert reply.finish_reason == "stop"


def test_what_only_begins_like_a_stop_string_is_sent_in_the_end() -> None:
    reply, pieces = Spoken(b"It is EN").reply(stop=("END",))
    assert reply.message.content == "".join(pieces) == "It is EN"


def test_a_reply_cut_by_a_stop_string_is_known_again_when_it_is_sent_back() -> None:
    spoken = Spoken(b"So. END")
    reply, _ = spoken.reply(stop=("END",))
    spoken.engine.runner.run = tiny_engine().runner.run  # type: ignore[method-assign]
    history = [*QUESTION, reply.message.to_openai(), *QUESTION]
    assert spoken.engine.respond(history, sampling=SamplingParams(max_new_tokens=1)).session_id == reply.session_id


def test_generated_calls_are_parsed_and_known_again_under_the_clients_own_ids() -> None:
    spoken = Spoken(b'Wait.<tool_call>\n{"name": "look", "arguments": {"n": 1, "a": 2}}\n</tool_call>')
    params = SamplingParams(max_new_tokens=200)
    reply = spoken.engine.respond(QUESTION, TOOLS, sampling=params)
    assert reply.finish_reason == "tool_calls"
    [call] = reply.message.tool_calls
    assert (reply.message.content, call.name, call.arguments) == ("Wait.", "look", '{"n": 1, "a": 2}')
    function = {"name": "look", "arguments": '{"a":2,"n":1}'}
    asked = {
        "role": "assistant",
        "content": "Wait.",
        "tool_calls": [{"id": "mine", "type": "function", "function": function}],
    }
    held = spoken.engine.session(reply.session_id).num_held_tokens
    spoken.engine.runner.run = tiny_engine().runner.run  # type: ignore[method-assign]
    history = [*QUESTION, asked, {"role": "tool", "tool_call_id": "mine", "content": "7"}]
    second = spoken.engine.respond(history, TOOLS, sampling=SamplingParams(max_new_tokens=1))
    assert second.session_id == reply.session_id
    assert second.usage.cached_tokens == held


def test_calls_of_a_reply_that_was_cut_do_not_count_as_a_finished_call() -> None:
    spoken = Spoken(b'<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call> and more')
    params = SamplingParams(max_new_tokens=62)
    reply = spoken.engine.respond(QUESTION, TOOLS, sampling=params)
    assert reply.message.tool_calls
    assert reply.finish_reason == "length"


def run(engine: Engine, sampling: SamplingParams, *, crowd: int) -> tuple[int, ...]:
    request = engine.generation(QUESTION, sampling=sampling)
    for number in range(crowd):
        other = conversation(1 + number, with_tools=False)[:-1]
        engine.submit(engine.generation(other, sampling=SamplingParams(temperature=1.0, max_new_tokens=30)))
    engine.submit(request)
    while not request.is_done:
        engine.step()
    return engine.reply(request).tokens


def test_one_seed_gives_one_reply_alone_or_in_a_crowd_and_another_seed_another() -> None:
    sampling = SamplingParams(temperature=1.0, seed=5, max_new_tokens=20)
    alone = run(tiny_engine(), sampling, crowd=0)
    assert run(tiny_engine(step=16), sampling, crowd=3) == alone
    assert run(tiny_engine(), SamplingParams(temperature=1.0, seed=6, max_new_tokens=20), crowd=0) != alone


def test_without_a_seed_two_replies_differ() -> None:
    sampling = SamplingParams(temperature=1.5, max_new_tokens=20)
    assert run(tiny_engine(), sampling, crowd=0) != run(tiny_engine(), sampling, crowd=0)


def test_logprobs_are_the_models_own_before_temperature_and_penalty() -> None:
    engine = tiny_engine()
    rows: list[Tensor] = []
    sampling = SamplingParams(temperature=0.5, seed=1, repetition_penalty=1.3, logprobs=3, max_new_tokens=5)
    request = engine.generation(QUESTION, sampling=sampling)
    request.observe = lambda logits: rows.append(logits[-1].clone())
    engine.submit(request)
    while not request.is_done:
        engine.step()
    reply = engine.reply(request)
    assert len(reply.logprobs) == len(reply.tokens) == 5
    for row, chosen in zip(rows, reply.logprobs, strict=False):
        want = torch.log_softmax(row.float(), -1)
        assert math.isclose(chosen.logprob, float(want[chosen.token]), abs_tol=1e-6)
        assert [token for token, _ in chosen.top] == want.topk(3).indices.tolist()
        assert all(math.isclose(value, float(want[token]), abs_tol=1e-6) for token, value in chosen.top)


def test_scored_and_generated_logprobs_of_one_reply_agree() -> None:
    engine = tiny_engine()
    reply = engine.respond(QUESTION, sampling=SamplingParams(logprobs=0, max_new_tokens=8))
    session = engine.session(reply.session_id)
    body = tuple(session.records[-1].tokens[session.records[-1].header_tokens :])
    request = engine.scoring([*QUESTION, {"role": "assistant", "content": "x"}])
    request.body = body
    engine.submit(request)
    while not request.is_done:
        engine.step()
    got = engine.score_of(request).logprobs[: len(reply.tokens)]
    want = [chosen.logprob for chosen in reply.logprobs]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), atol=1e-4, rtol=0)


def test_the_penalty_lowers_tokens_that_prompt_or_reply_hold() -> None:
    logits = torch.tensor([2.0, 1.9, -1.0])
    assert Sampler(SamplingParams()).choose(logits, [0]).token == 0
    assert Sampler(SamplingParams(repetition_penalty=1.2)).choose(logits, [0]).token == 1
    assert Sampler(SamplingParams(repetition_penalty=1.2)).choose(logits, [0, 1]).token == 0
    engine = tiny_engine()
    request = engine.generation(QUESTION, sampling=SamplingParams(max_new_tokens=3))
    engine.submit(request)
    while not request.is_done:
        engine.step()
    session = engine.session(engine.reply(request).session_id)
    ended = len(engine.renderer.end_tokens)
    assert request.history == [token for record in session.records for token in record.tokens][:-ended]


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [({"top_k": 1}, {0}), ({"top_p": 0.7}, {0, 1}), ({"min_p": 0.5}, {0, 1}), ({}, {0, 1, 2})],
)
def test_filters_keep_exactly_the_tokens_they_promise(sampling: dict[str, Any], allowed: set[int]) -> None:
    logits = torch.tensor([0.5, 0.4, 0.1]).log()
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3, **sampling))
    assert {sampler.choose(logits, []).token for _ in range(200)} == allowed
