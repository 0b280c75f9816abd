"""What a template sets around each message: learnt from stub conversations, at the level of text.

A message is rendered behind a short stub, and its text is what follows the last thing that the stub says, less what
ends the stub's last message. So neither the rest of the history nor its rewriting by the template shows in it.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from turnkv.conversation.encoding import Encoder
from turnkv.conversation.messages import Message
from turnkv.conversation.template import ASSISTANT, CALLER, RESULT, SYSTEM, USER, VALUE, RefusalError, Template
from turnkv.types import Role

_BEFORE = {
    Role.USER: (USER,),
    Role.ASSISTANT: (USER, ASSISTANT),
    Role.TOOL: (USER, CALLER, RESULT),
    Role.SYSTEM: (USER, ASSISTANT, SYSTEM),
}
"""The stub behind which a message is rendered, by the role of the message before it."""

_LEFT_CHARACTERS = 40
"""How much of the result before it a result is tokenised behind; enough to hold the end of a block."""


class Framing:
    """Cuts a template's text into messages: each assistant message ends at its end, glue begins the next message.

    Its methods raise RefusalError where the template cannot render what is asked for.
    """

    def __init__(self, template: Template, encoder: Encoder) -> None:
        self._template = template
        self._encoder = encoder
        self.closing = lru_cache(self._closing)
        self.header = lru_cache(self._header)
        self._call_tail = lru_cache(self._learn_call_tail)
        self._last_tail = self._after(_BEFORE[Role.ASSISTANT], [])
        history = self._after(_BEFORE[Role.ASSISTANT], [USER])
        special = encoder.specials.search(history)
        has_end = special is not None and encoder.has_special(self._last_tail)
        self.end = history[: special.end()] if special is not None and has_end else ""
        """What closes an assistant message in history; "" where the template writes no special token there."""
        rest = history[len(self.end) :]
        self._glue = rest[: len(rest) - len(rest.lstrip())]
        self.user_opening, _, self.user_tail = self.first_user(USER).partition(USER.content)
        self.header(Role.USER)

    def first_user(self, message: Message) -> str:
        """Return the text of a user message right after the head."""
        return self.fragment(Role.ASSISTANT, message).removeprefix(self._glue)

    def fragment(self, previous: Role, message: Message) -> str:
        """Return what the template writes for a message, from the end of the one before it to its own.

        Where the template refuses the order (it may want user and assistant to alternate), the message is rendered
        after a role that it accepts; if there is none, the refusal is that of the first try.
        """
        refusal = None
        for role in (previous, *(role for role in _BEFORE if role is not previous)):
            try:
                text = self._after(_BEFORE[role], [message])
                if not text.startswith(self.closing(role)):
                    raise RefusalError(f"it ends a {role.value} message by what comes after it")
            except RefusalError as error:
                refusal = refusal or error
                continue
            text = text.removeprefix(self.closing(role))
            if role is not previous:
                text = text.removeprefix(self._glue)
                text = self._glue + text if previous is Role.ASSISTANT else text
            return text
        raise RefusalError(str(refusal))

    def system(self, previous: Role, message: Message) -> str:
        """Return the text of a system message in mid-conversation, if the template has a place for one."""
        self.closing(Role.SYSTEM)  # refuses where system text is dropped or moved to the head
        if SYSTEM.content not in self.fragment(previous, SYSTEM):
            raise RefusalError("it leaves out system messages in mid-conversation")
        return self.fragment(previous, message)

    def reply(self, previous: Role, message: Message) -> tuple[str, str]:
        """Return an assistant message's text as its header and the rest, up to its end as it stands in history.

        Where the message does not begin with the whole generation prompt (one that ends in `<think>`, a message
        without reasoning), the header is the part of the prompt that every assistant message begins with.
        """
        if len(message.tool_calls) > 1:
            self._call_tail(len(message.tool_calls))  # refuses where the template shows fewer calls than there are
        text = self._cut_at_end(self.fragment(previous, message), message)
        header = self.header(previous)
        if not text.startswith(header):
            stub = self.fragment(previous, ASSISTANT)
            header = self._encoder.common_prefix(self._encoder.common_prefix(header, stub), text)
        return header, text[len(header) :]

    def result(self, group: Sequence[Message], index: int) -> tuple[str, str]:
        """Return the text before result `index` of its group, and that result's own.

        Templates may merge consecutive results into one block. It is cut where the renderings with one result fewer
        and one more stop being alike.
        """
        group = group[: index + 2]
        names = {message.call_ordinal or 0: message.name or "" for message in group}
        caller = _caller([names.get(ordinal, "zqfunctionqz") for ordinal in range(max(names) + 1)])
        tail = self._call_tail(max(names) + 1)
        texts = [self._after((USER, caller), group[:count]) for count in range(max(1, index), len(group) + 1)]
        if not all(text.startswith(tail) for text in texts):
            raise RefusalError("it ends an assistant message by what comes after it")
        start = len(tail)
        if index > 0:
            start = len(self._encoder.common_prefix(texts[0], texts[1]))
            texts = texts[1:]
        text = texts[0] if len(texts) == 1 else self._encoder.common_prefix(texts[0], texts[1])
        return text[max(0, start - _LEFT_CHARACTERS) : start], text[start:]

    def stop_texts(self) -> set[str]:
        """Return the special tokens with which the template ends assistant messages: last, in history, with calls."""
        tails = [self.end, self._last_tail, self._call_tail(1)]
        found = [self._encoder.specials.search(tail) for tail in tails]
        return {special[0] for special in found if special is not None}

    def last_special(self, text: str) -> tuple[int, int] | None:
        """Return the place of the last special token that the template itself wrote."""
        places = [token.span() for token in self._encoder.specials.finditer(self._encoder.blank_marked(text))]
        return places[-1] if places else None

    def _after(self, before: Sequence[Message], messages: Sequence[Message], *, is_prompt: bool = False) -> str:
        """Render a stub and messages, and return what follows the last thing that the stub says."""
        text = self._template.render([*before, *messages], is_prompt=is_prompt)
        last = VALUE if before[-1].tool_calls else before[-1].content
        # All stub calls have one value, and no message comes before them: the text is cut after the last of them.
        num_last = max(1, len(before[-1].tool_calls))
        *stub, rest = text.split(last, num_last)
        if len(stub) != num_last or not all(message.content in stub[0] for message in before[:-1]):
            raise RefusalError(f"it leaves out or moves {before[-1].role.value} messages or their calls")
        return rest

    def _closing(self, role: Role) -> str:
        """Return what ends a message of this role: the part that no message after it changes."""
        if role is Role.ASSISTANT:
            return self.end
        last = self._after(_BEFORE[role], [])
        try:
            return self._encoder.common_prefix(last, self._after(_BEFORE[role], [ASSISTANT]))
        except RefusalError:
            return last

    def _header(self, previous: Role) -> str:
        """Return the generation prompt after a message of this role."""
        if previous is Role.ASSISTANT:
            return self._glue + self.header(Role.USER)
        try:
            text, closing = self._after(_BEFORE[previous], [], is_prompt=True), self.closing(previous)
            if not text.startswith(closing):
                raise RefusalError("its generation prompt rewrites the message before it")
        except RefusalError:
            if previous is Role.USER:
                raise
            return self.header(Role.USER)
        return text.removeprefix(closing)

    def _learn_call_tail(self, num_calls: int) -> str:
        """Return what follows the last argument of an assistant's calls, up to that message's end."""
        return self._cut_at_last_special(self._after((USER, _caller(["zqfunctionqz"] * num_calls)), []))

    def _cut_at_end(self, text: str, message: Message) -> str:
        """Cut an assistant's text right after its end."""
        if message.tool_calls:
            return self._cut_at_last_special(text) if self._encoder.has_special(self._call_tail(1)) else text.rstrip()
        if text.endswith(self._last_tail):
            return text.removesuffix(self._last_tail) + self.end
        return self._cut_at_last_special(text) if self.end else text.rstrip()

    def _cut_at_last_special(self, text: str) -> str:
        last = self.last_special(text)
        return text[: last[1]] if last else text.rstrip()


def _caller(names: Sequence[str]) -> Message:
    return replace(CALLER, tool_calls=tuple(replace(CALLER.tool_calls[0], name=name) for name in names))
