"""Messages to tokens, one by one, for any chat template.

A message is rendered behind a short stub conversation, and its text is what follows the stub. So its tokens never
depend on the rest of the history, and a template that rewrites history (drops earlier reasoning, writes today's date)
cannot change what is cached. Each text ends where the next begins:

    head │ user                        │ assistant                            │ user
    <s>… │ <|im_start|>user⏎Hi<|im_end|>⏎ │ <|im_start|>assistant⏎Hey<|im_end|> │ ⏎<|im_start|>user⏎…
                                         └── generation prompt ──┘└─ sampled ─┘└ end
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnkv.conversation import hermes
from turnkv.conversation.encoding import Encoder
from turnkv.conversation.framing import Framing
from turnkv.conversation.head import HeadForms, leading_systems
from turnkv.conversation.messages import Message, ToolCall
from turnkv.conversation.spans import Classifier, Span, TokenTexts, rank_of, runs, spans_of, token_ranks
from turnkv.conversation.template import RefusalError, Template
from turnkv.errors import InvalidMessagesError, UnsupportedModelError
from turnkv.types import Role, SpanClass


@dataclass(frozen=True, slots=True)
class RenderedMessage:
    """One message's tokens."""

    tokens: tuple[int, ...]
    header_tokens: int
    """Leading tokens that are the generation prompt; 0 unless the message is an assistant's."""


class Renderer:
    """Renders conversations for one tokenizer and chat template.

    Not safe for use by several threads at once.
    """

    def __init__(
        self, tokenizer: Any, *, chat_template: str | None = None, generation_eos_ids: Iterable[int] = ()
    ) -> None:
        """Probe the template.

        Args:
            tokenizer: a Hugging Face tokenizer.
            chat_template: used in place of the tokenizer's own.
            generation_eos_ids: the ends of generation that the model's generation config names.

        Raises:
            UnsupportedModelError: there is no template, or it cannot render user and assistant in turn.
        """
        source = _source(tokenizer, chat_template)
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self._encoder = Encoder(tokenizer, source)
        self._template = Template(tokenizer, source, self._encoder)
        try:
            self._framing = Framing(self._template, self._encoder)
            stop_texts = self._framing.stop_texts()
        except RefusalError as error:
            raise UnsupportedModelError(
                f"the chat template cannot render user and assistant in turn ({error}); give another one"
            ) from error
        self._heads = HeadForms(self._template, self._encoder, self._framing)
        self.end_tokens: tuple[int, ...] = tuple(self._encoder.encode(self._framing.end, "."))
        """What closes an assistant message in history; `generation_header` + sampled tokens + this is one."""
        self.stop_ids: frozenset[int] = self._stop_ids(stop_texts, generation_eos_ids)
        """Tokens at which generation ends."""

    @property
    def has_native_tools(self) -> bool:
        """Whether the template has a tool form of its own; else the Hermes form is used."""
        return self._template.has_tools

    def head(self, messages: Sequence[Message], tools: Sequence[object] = ()) -> tuple[int, ...]:
        """Return the tokens before the first message that is not leading system text.

        They hold the BOS, the system texts or the template's default one, and the tool schemas. A template that writes
        the date writes today's.

        Raises:
            InvalidMessagesError: the template has no room for the system text or the tools.
        """
        return tuple(self._encoder.encode(self._heads.text(leading_systems(messages), tools)))

    def render(
        self, messages: Sequence[Message], tools: Sequence[object] = (), start: int = 0
    ) -> list[RenderedMessage]:
        """Render `messages[start:]`, less leading system messages: one entry each.

        A message's tokens depend on that message, on the role of the one before it and, among consecutive tool
        results, on these; so rendering in pieces gives what rendering at once gives, if no piece ends among results.

        Raises:
            InvalidMessagesError: the template cannot hold a message; the error carries the template's own words.
        """
        num_systems = len(leading_systems(messages))
        rendered = []
        for index in range(max(start, num_systems), len(messages)):
            try:
                if messages[index].role is Role.TOOL:
                    rendered.append(self._result(messages, index))
                elif index == num_systems:
                    rendered.append(self._first(messages[index], self._heads.is_open(num_systems, bool(tools))))
                else:
                    rendered.append(self._later(messages[index - 1].role, messages[index]))
            except RefusalError as error:
                raise InvalidMessagesError(
                    f"the chat template cannot render this {messages[index].role.value} message here ({error})",
                    remedy="merge it with its neighbour, move system text to the start, or give another chat template",
                    index=index,
                ) from error
        return rendered

    def generation_header(self, previous: Message) -> tuple[int, ...]:
        """Return the tokens between a conversation that ends with `previous` and the model's reply."""
        return tuple(self._encoder.encode(self._framing.header(previous.role), self._left(previous.role)))

    def spans(
        self, message: Message | None, tokens: Sequence[int], classifier: Classifier, header_tokens: int = 0
    ) -> tuple[Span, ...]:
        """Class the tokens that a session holds for a message, rendered or generated; the spans partition them.

        Calls and reasoning are known from the message's structure, numbers and code by the classifier's patterns.
        Numbers and code inside reasoning are such; all that belongs to calls is `tool_call`.

        Args:
            message: None for the head, system text and tool schemas.
            tokens: all of them, or leading ones.
            classifier: the patterns.
            header_tokens: how many leading ones are the generation prompt.
        """
        text, first, last = self._texts.place(tokens)
        added = self._texts.added(tokens)
        below, at = np.zeros(len(text), dtype=np.uint8), 0
        if message is not None and message.role is Role.ASSISTANT:
            at = int(first[header_tokens]) if header_tokens < len(tokens) else len(text)
            for part, span_class in ((message.reasoning, SpanClass.REASONING), (message.content, SpanClass.TEXT)):
                said = (part or "").strip()
                start = text.find(said, at) if said else -1
                if start >= 0:
                    at = start + len(said)
                    below[start:at] = rank_of(span_class)
        ranks = classifier.ranks(text, below)
        for index in added:
            place = slice(first[index], last[index] + 1)
            ranks[place] = below[place]
        if message is not None and message.tool_calls:
            stop = int(first[added[-1]]) if added and added[-1] >= header_tokens else len(text)
            ranks[at:stop] = rank_of(SpanClass.TOOL_CALL)
        role = Role.SYSTEM if message is None else message.role
        return spans_of(runs(token_ranks(ranks, text, first, last)), role)

    def parse_reply(self, text: str) -> tuple[str, tuple[ToolCall, ...], str | None]:
        """Split a reply's text into content, calls and reasoning.

        Calls are read in the Hermes form, where that is the one used or the template's own; other forms stay text.
        """
        reasoning = None
        if self._template.has_thoughts:
            is_open = self._framing.header(Role.USER).rstrip().endswith("<think>")
            text, reasoning = hermes.parse_reasoning(text, is_open=is_open)
        if self._template.has_tools and "<tool_call>" not in self._template.source:
            return text, (), reasoning
        return *hermes.parse_calls(text), reasoning

    def _first(self, message: Message, is_open: bool) -> RenderedMessage:
        """Render the message right after the head; an open head holds the first user message's opening."""
        if message.role is not Role.USER:
            if is_open:
                raise RefusalError("it puts system text or tools into a first user message, and there is none")
            return self._reply(Role.USER, message)
        text = self._framing.first_user(message)
        if not is_open:
            return self._plain(text, "")
        opening = self._framing.user_opening
        return self._plain(text.removeprefix(opening), opening)

    def _later(self, previous: Role, message: Message) -> RenderedMessage:
        if message.role is Role.ASSISTANT:
            return self._reply(previous, message)
        write = self._framing.system if message.role is Role.SYSTEM else self._framing.fragment
        return self._plain(write(previous, message), self._left(previous))

    def _plain(self, text: str, left: str) -> RenderedMessage:
        return RenderedMessage(tuple(self._encoder.encode(text, left)), 0)

    def _reply(self, previous: Role, message: Message) -> RenderedMessage:
        """Render an assistant message: the generation prompt's tokens, then those that the model would sample."""
        header, text = self._framing.reply(previous, message)
        left = self._left(previous)
        head = self._encoder.encode(header, left)
        body = self._encoder.encode(text, header or left)
        return RenderedMessage((*head, *body), len(head))

    def _left(self, previous: Role) -> str:
        """Return what a message is tokenised behind: the end of the one before it."""
        try:
            return self._framing.closing(previous)
        except RefusalError:  # only system text in mid-conversation, which the conversation then cannot hold
            return ""

    def _result(self, messages: Sequence[Message], index: int) -> RenderedMessage:
        first = index
        while first > 0 and messages[first - 1].role is Role.TOOL:
            first -= 1
        group = [message for message in messages[first : index + 2] if message.role is Role.TOOL]
        left, text = self._framing.result(group, index - first)
        return self._plain(text, left)

    def _stop_ids(self, stop_texts: Iterable[str], generation_eos_ids: Iterable[int]) -> frozenset[int]:
        ids = {int(token_id) for token_id in generation_eos_ids}
        if self._tokenizer.eos_token_id is not None:
            ids.add(self._tokenizer.eos_token_id)
        return frozenset(ids.union(self._tokenizer.convert_tokens_to_ids(sorted(stop_texts))))


def _source(tokenizer: Any, chat_template: str | None) -> str:
    if chat_template is not None:
        return chat_template
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise UnsupportedModelError(
            "the model's tokenizer has no chat template; give one with `chat_template`"
        ) from error
