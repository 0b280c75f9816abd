"""A chat template, fed with messages: what it can hold is found out by trying, never by its family's name."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jinja2.exceptions import TemplateError

from turnkv.conversation import hermes
from turnkv.conversation.encoding import Encoder
from turnkv.conversation.messages import Message, ToolCall, load_arguments
from turnkv.types import Role

USER = Message(Role.USER, "zqUserqz")
ASSISTANT = Message(Role.ASSISTANT, "zqAssistantqz")
VALUE = "zqValueqz"
CALLER = Message(Role.ASSISTANT, "", (ToolCall("", "zqfunctionqz", f'{{"zqargumentqz": "{VALUE}"}}'),))
RESULT = Message(Role.TOOL, "zqResultqz", (), "", "zqfunctionqz", None, 0)
SYSTEM = Message(Role.SYSTEM, "zqSystemqz")
TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "zqfunctionqz",
        "description": "zqDescriptionqz",
        "parameters": {"type": "object", "properties": {"zqargumentqz": {"type": "string", "description": "zq"}}},
    },
}

_REASONING = Message(Role.ASSISTANT, "zqAssistantqz", reasoning="zqReasoningqz")

Entry = dict[str, Any]
"""One message in the form that templates read."""


class RefusalError(Exception):
    """The template cannot render these messages; the text is its own."""


class Template:
    """A chat template with its tool form settled: its own, or the Hermes form where it has none."""

    def __init__(self, tokenizer: Any, source: str, encoder: Encoder) -> None:
        self.source = source
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._outro = ""
        self._has_text_arguments = False
        self._reasoning_fields: tuple[str, ...] = ()
        self._outro = self._probe_outro()
        self.has_tools = self._probe_tools()
        self._reasoning_fields = self._probe_reasoning()
        caller = replace(CALLER, content=ASSISTANT.content)
        self.has_content_beside_calls = ASSISTANT.content in self._try(self.entries([USER, caller]))

    @property
    def has_thoughts(self) -> bool:
        """Whether the template speaks of `<think>` blocks."""
        return "<think>" in self.source

    def render(self, messages: Sequence[Message], *, is_prompt: bool = False) -> str:
        """Return the template's text for these messages, their control tokens marked.

        Raises:
            RefusalError: the template cannot render them.
        """
        return self.apply(self.entries(messages), is_prompt=is_prompt)

    def apply(self, entries: Sequence[Entry], tools: Sequence[object] = (), *, is_prompt: bool = False) -> str:
        """Run the template over entries and native tools, whose control tokens are marked already.

        Raises:
            RefusalError: the template cannot render them.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(entries),
                tools=list(tools) or None,
                chat_template=self.source,
                add_generation_prompt=is_prompt,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise RefusalError(str(error)) from error
        return text if is_prompt else text.removesuffix(self._outro)

    def entries(self, messages: Sequence[Message]) -> list[Entry]:
        """Return messages in the form that the template reads."""
        entries: list[Entry] = []
        results: list[str] = []
        for message in messages:
            if message.role is not Role.TOOL or self.has_tools:
                results = []
                entries.append(self._entry(message))
                continue
            if not results:
                entries.append({"role": "user"})
            results.append(self._encoder.mark(message.content))
            entries[-1]["content"] = hermes.results_text(results)
        return entries

    def _entry(self, message: Message) -> Entry:
        is_reply = message.role is Role.ASSISTANT
        content = self._encoder.mark(message.content, is_reply=is_reply)
        entry: Entry = {"role": message.role.value, "content": content}
        if message.role is Role.TOOL:
            entry |= {"name": self._encoder.mark(message.name), "tool_call_id": _call_id(message.call_ordinal or 0)}
        if message.reasoning is not None:
            reasoning = self._encoder.mark(message.reasoning, is_reply=True)
            if not self._reasoning_fields and self.has_thoughts:
                entry["content"] = f"<think>\n{reasoning}\n</think>\n\n{entry['content']}"
            entry |= dict.fromkeys(self._reasoning_fields, reasoning)
        if message.tool_calls:
            calls = [
                (self._encoder.mark(call.name), self._encoder.mark(load_arguments(call.arguments)))
                for call in message.tool_calls
            ]
            if self.has_tools:
                entry["tool_calls"] = [self._native_call(place, *call) for place, call in enumerate(calls)]
            else:
                entry["content"] = hermes.calls_text(entry["content"], calls)
        return entry

    def _native_call(self, ordinal: int, name: str, arguments: dict[str, object]) -> Entry:
        given = hermes.json_text(arguments) if self._has_text_arguments else arguments
        return {"id": _call_id(ordinal), "type": "function", "function": {"name": name, "arguments": given}}

    def _probe_outro(self) -> str:
        """Return what the template writes after a whole conversation, beyond the end of its last message.

        Phi closes with an EOS; no later message has one before it, so it is no message's.
        """
        last = self._try(self.entries([USER, ASSISTANT])).partition(ASSISTANT.content)[2]
        history = self._try(self.entries([USER, ASSISTANT, USER])).partition(ASSISTANT.content)[2]
        shared = self._encoder.common_prefix(last, history)
        return last[len(shared) :] if self._encoder.has_special(shared) else ""

    def _probe_tools(self) -> bool:
        """Find out whether schemas, calls and results all show; calls may want their arguments as text."""
        self.has_tools = True
        schemas = [self._try(self.entries(messages), [TOOL]) for messages in ([USER], [SYSTEM, USER])]
        if not any("zqfunctionqz" in text for text in schemas):
            return False
        for self._has_text_arguments in (False, True):
            text = self._try(self.entries([USER, CALLER, RESULT]))
            if all(part in text for part in ("zqfunctionqz", VALUE, RESULT.content)):
                return True
        return False

    def _probe_reasoning(self) -> tuple[str, ...]:
        for field in ("reasoning_content", "reasoning", "thinking"):
            self._reasoning_fields = (field,)
            if "zqReasoningqz" in self._try(self.entries([USER, _REASONING])):
                return (field,)
        return ()

    def _try(self, entries: Sequence[Entry], tools: Sequence[object] = ()) -> str:
        try:
            return self.apply(entries, tools)
        except RefusalError:
            return ""


def _call_id(ordinal: int) -> str:
    """Name a call by its place: clients rewrite ids, and Mistral's templates want nine letters and digits."""
    return f"call{ordinal:05d}"
