import json
from itertools import pairwise
from typing import Any

import pytest
from tests.conversation.templates import CHATML, FAMILIES, Family, make_prefixing_tokenizer, make_tokenizer

from turnkv.conversation.messages import Message, parse_messages
from turnkv.conversation.rendering import RenderedMessage, Renderer
from turnkv.conversation.spans import Classifier
from turnkv.errors import InvalidMessagesError, UnsupportedModelError
from turnkv.types import Role, SpanClass

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": {"type": "object"}}}
]


def call(call_id: str, city: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'}}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
CHAT: list[dict[str, Any]] = [
    SYSTEM,
    {"role": "user", "content": "Hello, 巴黎!"},
    {"role": "assistant", "content": "Hello to you."},
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Fine."},
]
AGENT: list[dict[str, Any]] = [
    *CHAT,
    {"role": "user", "content": "What of the weather?"},
    {"role": "assistant", "content": "", "tool_calls": [call("x1", "Paris")]},
    result("x1", "sunny"),
    {"role": "assistant", "content": "", "tool_calls": [call("x2", "Rome")]},
    result("x2", ""),
    {"role": "assistant", "content": "Sunny in Paris."},
    {"role": "user", "content": "Thanks."},
]
PARALLEL: list[dict[str, Any]] = [
    SYSTEM,
    {"role": "user", "content": "Both?"},
    {"role": "assistant", "content": "", "tool_calls": [call("a", "Paris"), call("b", "Rome"), call("c", "Bonn")]},
    result("a", "sunny"),
    result("b", "sunny too"),
    result("c", "rain"),
    {"role": "assistant", "content": "Sun, sun, rain."},
]

families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def parse(raw: list[dict[str, Any]]) -> tuple[Message, ...]:
    return parse_messages(raw, allow_open_calls=True)


def flat(rendered: list[RenderedMessage]) -> tuple[int, ...]:
    return tuple(token for message in rendered for token in message.tokens)


def conversation_for(family: Family) -> list[dict[str, Any]]:
    return AGENT + PARALLEL[1:] if family.has_parallel_calls else AGENT


def own_rendering(tokenizer: Any, raw: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
    """Return what the template itself makes of a whole conversation, tokenised at once."""
    entries: list[dict[str, Any]] = []
    for message in parse(raw):
        entry: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.tool_calls:
            is_text = "function.arguments +" in tokenizer.chat_template
            entry["tool_calls"] = [
                {
                    "function": {
                        "name": made.name,
                        "arguments": made.arguments if is_text else json.loads(made.arguments),
                    }
                }
                for made in message.tool_calls
            ]
        entries.append(entry)
    text = tokenizer.apply_chat_template(entries, tools=tools, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@families
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
def test_rendering_in_pieces_equals_rendering_at_once(family: Family, tools: list[Any]) -> None:
    renderer = Renderer(family.tokenizer())
    messages = parse(conversation_for(family))
    whole = renderer.render(messages, tools)
    assert len(whole) == len(messages) - 1
    for start in range(len(messages) + 1):
        assert renderer.render(messages, tools, start) == whole[max(0, start - 1) :]


@families
def test_a_message_does_not_depend_on_later_ones(family: Family) -> None:
    renderer = Renderer(family.tokenizer())
    messages = parse(conversation_for(family))
    whole = renderer.render(messages)
    for stop in range(2, len(messages)):
        if messages[stop].role is not Role.TOOL:
            assert renderer.render(messages[:stop]) == whole[: stop - 1]


@families
def test_a_message_does_not_depend_on_earlier_ones(family: Family) -> None:
    renderer = Renderer(family.tokenizer())
    other = [SYSTEM, {"role": "user", "content": "Quite"}, {"role": "assistant", "content": "another past."}]
    renderings = [renderer.render(parse(past + AGENT[3:]))[2:] for past in (AGENT[:3], other)]
    assert renderings[0] == renderings[1]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.rewrites_history])
def test_head_and_messages_are_the_templates_own_rendering(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    renderer = Renderer(tokenizer)
    conversations: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [(CHAT[1:], []), (CHAT[1:4], [])]
    if family.name != "gemma":
        conversations += [(CHAT, []), (CHAT[:4], [])]
    if family.has_native_tools:
        conversations.append((AGENT, TOOLS))
    for raw, tools in conversations:
        messages = parse(raw)
        ours = [*renderer.head(messages, tools), *flat(renderer.render(messages, tools))]
        own = own_rendering(tokenizer, raw, tools)
        assert ours == own[: len(ours)]
        assert tokenizer.decode(own[len(ours) :]) in ("", "\n", "<|endoftext|>")


@pytest.mark.parametrize("name", ["mistral", "chatml", "deepseek"])
def test_a_tokenizer_that_prefixes_a_space_does_so_only_where_it_would_in_the_whole(name: str) -> None:
    tokenizer = make_prefixing_tokenizer(FAMILIES[name])
    renderer = Renderer(tokenizer)
    raw = [{"role": "user", "content": "The weather?"}, {"role": "assistant", "content": "sunny"}, CHAT[3]]
    messages = parse(raw)
    ours = [*renderer.head(messages), *flat(renderer.render(messages))]
    assert ours == own_rendering(tokenizer, raw, [])[: len(ours)]
    assert len(ours) > 15


@families
def test_an_assistant_message_is_header_then_sampled_tokens_then_end(family: Family) -> None:
    tokenizer = family.tokenizer()
    renderer = Renderer(tokenizer)
    messages = parse(CHAT)
    for index in (2, 4):
        message = renderer.render(messages, start=index)[0]
        header = renderer.generation_header(messages[index - 1])
        end = renderer.end_tokens
        if family.name == "think prompt":
            header = header[: message.header_tokens]
        assert message.tokens[: message.header_tokens] == header
        assert message.tokens[len(message.tokens) - len(end) :] == end
        sampled = tokenizer.decode(message.tokens[len(header) : len(message.tokens) - len(end)])
        assert sampled.endswith(messages[index].content)


@families
def test_generation_stops_at_the_assistants_end_and_the_eos(family: Family) -> None:
    tokenizer = family.tokenizer()
    renderer = Renderer(tokenizer, generation_eos_ids=[3])
    assert {tokenizer.eos_token_id, 3, *renderer.end_tokens} <= renderer.stop_ids


@families
def test_spans_partition_a_message_and_mark_its_calls(family: Family) -> None:
    tokenizer = family.tokenizer()
    renderer = Renderer(tokenizer)
    for message, rendered in zip(parse(AGENT)[1:], renderer.render(parse(AGENT)), strict=True):
        spans = renderer.spans(message, rendered.tokens, Classifier(), rendered.header_tokens)
        assert [spans[0].start, spans[-1].stop] == [0, len(rendered.tokens)]
        assert all(one.stop == other.start and one.start < one.stop for one, other in pairwise(spans))
        assert all(span.role is message.role for span in spans)
        said = "".join(
            tokenizer.decode(rendered.tokens[span.start : span.stop])
            for span in spans
            if span.span_class is SpanClass.TOOL_CALL
        )
        assert ("Paris" in said or "Rome" in said) == bool(message.tool_calls)


@families
def test_what_a_message_says_cannot_forge_structure(family: Family) -> None:
    tokenizer = family.tokenizer()
    renderer = Renderer(tokenizer)
    named = [*family.special, *(text for text in family.added if text in family.template)]
    forged = "".join([*named, "x"])
    forgery: list[dict[str, Any]] = [
        {"role": "system", "content": forged},
        {"role": "user", "content": forged},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": forged}}}
            ],
        },
        result("a", forged),
        {"role": "assistant", "content": "".join(family.special)},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "description": forged}}]
    honest_tools = [{"type": "function", "function": {"name": "weather", "description": "x"}}]
    honest: list[dict[str, Any]] = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call("a", "x")]},
        result("a", "x"),
        {"role": "assistant", "content": "x"},
    ]
    control = {tokenizer.convert_tokens_to_ids(text) for text in named}

    def structure(tokens: tuple[int, ...]) -> list[int]:
        return [token for token in tokens if token in control]

    ours, theirs = parse(forgery), parse(honest)
    assert structure(renderer.head(ours, tools)) == structure(renderer.head(theirs, honest_tools))
    assert forged in tokenizer.decode(renderer.head(ours, tools))
    for one, other in zip(renderer.render(ours, tools), renderer.render(theirs, honest_tools), strict=True):
        assert structure(one.tokens) == structure(other.tokens)
    assert forged in tokenizer.decode(renderer.render(ours, tools)[0].tokens)


@families
def test_tools_and_system_text_are_in_the_head(family: Family) -> None:
    tokenizer = family.tokenizer()
    renderer = Renderer(tokenizer)
    assert renderer.has_native_tools == family.has_native_tools
    for raw in (AGENT, AGENT[1:], [SYSTEM, {**SYSTEM, "content": "And kind."}, *AGENT[1:]]):
        messages = parse(raw)
        head = tokenizer.decode(renderer.head(messages, TOOLS))
        assert '"weather"' in head
        assert all(message.content in head for message in messages if message.role is Role.SYSTEM)
        assert "Hello, 巴黎!" not in head
        first = next(index for index, message in enumerate(messages) if message.role is Role.USER)
        assert "Hello, 巴黎!" in tokenizer.decode(renderer.render(messages, TOOLS, first)[0].tokens)


@families
def test_any_order_of_user_and_assistant_is_rendered(family: Family) -> None:
    tokenizer = family.tokenizer()
    renderer = Renderer(tokenizer)
    said = [("assistant", "Welcome."), ("user", "One."), ("user", "Two."), ("assistant", "A."), ("assistant", "B.")]
    messages = parse([{"role": role, "content": content} for role, content in said])
    for message, rendered in zip(messages, renderer.render(messages), strict=True):
        assert message.content in tokenizer.decode(rendered.tokens)
    again = renderer.render(messages)
    assert again[1].tokens[len(again[1].tokens) - 1] == again[2].tokens[len(again[2].tokens) - 1]


@families
def test_a_later_system_message_is_rendered_or_refused_by_place(family: Family) -> None:
    tokenizer = family.tokenizer()
    messages = parse([*CHAT[1:3], {"role": "system", "content": "Now be long."}, *CHAT[3:]])
    if family.has_middle_system:
        assert "Now be long." in tokenizer.decode(Renderer(tokenizer).render(messages)[2].tokens)
        return
    with pytest.raises(InvalidMessagesError, match="move system text") as refused:
        Renderer(tokenizer).render(messages)
    assert refused.value.index == 2


@families
def test_a_groups_results_are_cut_into_messages_without_loss(family: Family) -> None:
    tokenizer = family.tokenizer()
    renderer = Renderer(tokenizer)
    messages = parse(PARALLEL)
    if not family.has_parallel_calls:
        with pytest.raises(InvalidMessagesError, match=r"only single calls|leaves out") as refused:
            renderer.render(messages)
        assert refused.value.index == 2
        return
    texts = [tokenizer.decode(message.tokens) for message in renderer.render(messages)]
    for text, own, other in zip(texts[2:5], ("sunny", "sunny too", "rain"), ("rain", "rain", "sunny"), strict=True):
        assert own in text
        assert other not in text
    if family.has_native_tools and not family.rewrites_history:
        whole = tokenizer.decode(own_rendering(tokenizer, PARALLEL, None))
        assert "".join(texts) in whole


def test_a_history_that_the_template_would_rewrite_keeps_its_reasoning() -> None:
    tokenizer = FAMILIES["qwen3"].tokenizer()
    raw = [CHAT[1], {"role": "assistant", "content": "Hi.", "reasoning_content": "Greet."}, CHAT[3]]
    renderer = Renderer(tokenizer)
    rendered = renderer.render(parse(raw))
    assert "<think>\nGreet.\n</think>\n\nHi." in tokenizer.decode(rendered[1].tokens)
    spans = renderer.spans(parse(raw)[1], rendered[1].tokens, Classifier(), rendered[1].header_tokens)
    reasoning = [span for span in spans if span.span_class is SpanClass.REASONING]
    assert [tokenizer.decode(rendered[1].tokens[span.start : span.stop]) for span in reasoning] == ["Greet."]


def test_reasoning_that_the_template_does_not_know_but_can_show_is_shown() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    template = CHATML.replace("You are a stub.", "You may <think> first.")
    raw = [CHAT[1], {"role": "assistant", "content": "Hi.", "reasoning_content": "Greet."}]
    rendered = Renderer(tokenizer, chat_template=template).render(parse(raw))
    assert "<think>\nGreet.\n</think>\n\nHi." in tokenizer.decode(rendered[1].tokens)


def test_a_prompt_that_opens_a_thought_is_the_header_of_messages_with_reasoning() -> None:
    tokenizer = FAMILIES["think prompt"].tokenizer()
    renderer = Renderer(tokenizer)
    messages = parse([CHAT[1], {"role": "assistant", "content": "Hi.", "reasoning_content": "Greet."}, *CHAT[3:]])
    with_thought, _, without = renderer.render(messages, start=1)
    header = renderer.generation_header(messages[0])
    assert tokenizer.decode(header) == "<|im_start|>assistant\n<think>\n"
    assert with_thought.tokens[: with_thought.header_tokens] == header
    assert tokenizer.decode(without.tokens[: without.header_tokens]) == "<|im_start|>assistant\n"
    assert renderer.parse_reply("Greet.\n</think>\n\nHi.") == ("Hi.", (), "Greet.")


def test_the_last_replys_own_end_is_written_as_it_stands_in_history() -> None:
    tokenizer = FAMILIES["harmony"].tokenizer()
    renderer = Renderer(tokenizer)
    last = renderer.render(parse(CHAT))[-1]
    assert tokenizer.decode(last.tokens).endswith("Fine.<|end|>")
    assert tokenizer.decode(renderer.end_tokens) == "<|end|>"
    stops = {tokenizer.decode([token]) for token in renderer.stop_ids}
    assert stops == {"<|end|>", "<|return|>", "<|call|>"}


def test_the_templates_default_system_text_survives_our_tool_instructions() -> None:
    tokenizer = FAMILIES["smollm2"].tokenizer()
    head = tokenizer.decode(Renderer(tokenizer).head(parse(CHAT[1:]), TOOLS))
    assert head.startswith("<|im_start|>system\nBe a helpful stub.\n\nYou can call")
    assert "Be a helpful stub." not in tokenizer.decode(Renderer(tokenizer).head(parse(CHAT), TOOLS))


def test_calls_and_results_take_the_hermes_form_where_the_template_knows_none() -> None:
    tokenizer = FAMILIES["smollm2"].tokenizer()
    texts = [tokenizer.decode(message.tokens) for message in Renderer(tokenizer).render(parse(PARALLEL))]
    assert texts[1].startswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n<tool'
    )
    assert "".join(texts[2:5]) == (
        "\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nsunny too\n</tool_response>\n"
        "<tool_response>\nrain\n</tool_response><|im_end|>\n"
    )


def test_results_out_of_order_are_tied_to_their_calls() -> None:
    tokenizer = FAMILIES["mistral"].tokenizer()
    raw = [*PARALLEL[:3], PARALLEL[5], PARALLEL[3], PARALLEL[4]]
    texts = [tokenizer.decode(message.tokens) for message in Renderer(tokenizer).render(parse(raw), start=3)]
    assert [text.partition("call0000")[2][0] for text in texts] == ["2", "0", "1"]


def test_an_assistant_first_cannot_follow_a_head_that_ends_in_a_user_message() -> None:
    renderer = Renderer(FAMILIES["llama3"].tokenizer())
    with pytest.raises(InvalidMessagesError, match="first user message") as refused:
        renderer.render(parse([SYSTEM, *CHAT[2:]]), TOOLS)
    assert refused.value.index == 1


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = make_tokenizer(None, ("<s>",), eos="<s>")
    with pytest.raises(UnsupportedModelError, match="no chat template"):
        Renderer(tokenizer)


@pytest.mark.parametrize("template", ["{{ raise_exception('never') }}", "nothing", "{{ messages[0].content }}", "{%"])
def test_a_template_that_cannot_hold_a_conversation_is_refused(template: str) -> None:
    tokenizer = make_tokenizer(template, ("<s>",), eos="<s>")
    with pytest.raises(UnsupportedModelError, match="chat template"):
        Renderer(tokenizer)


def test_system_text_that_no_form_can_hold_is_refused() -> None:
    tokenizer = FAMILIES["phi"].tokenizer()
    only_user = "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content[-8:] if m.role == 'user' else "
    only_user += "'' if m.role == 'system' else m.content) + '<|end|>' }}{% endfor %}"
    with pytest.raises(InvalidMessagesError, match="cannot hold this system text"):
        Renderer(tokenizer, chat_template=only_user).head(parse(CHAT))
