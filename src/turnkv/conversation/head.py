"""The head: all that a template writes before the first message that is not leading system text."""

from collections.abc import Sequence

from turnkv.conversation import hermes
from turnkv.conversation.encoding import Encoder
from turnkv.conversation.framing import Framing
from turnkv.conversation.messages import Message
from turnkv.conversation.template import SYSTEM, TOOL, USER, Entry, RefusalError, Template
from turnkv.errors import InvalidMessagesError, UnsupportedModelError
from turnkv.types import Role

_FORMS = ("separate", "merged", "folded")
"""How system texts reach the template, tried in this order: as they are; as one; before the first user's text."""


class HeadForms:
    """Finds, once for each shape of head, a form that the template can hold.

    Shapes differ in the number of leading system messages (0, 1, more) and in whether there are tools.
    """

    def __init__(self, template: Template, encoder: Encoder, framing: Framing) -> None:
        self._template = template
        self._encoder = encoder
        self._framing = framing
        self._shapes: dict[tuple[int, bool], tuple[str, bool]] = {}
        self._default_system = "" if template.has_tools else self._probe_default_system()

    def text(self, systems: Sequence[Message], tools: Sequence[object]) -> str:
        """Return the head's text, control tokens of system texts and schemas marked."""
        form, is_open = self._shape(len(systems), bool(tools))
        before, _ = self._split(form, [message.content for message in systems], tools)
        return before if is_open else before.removesuffix(self._framing.user_opening)

    def is_open(self, num_systems: int, has_tools: bool) -> bool:
        """Say whether the head ends inside the first user message, where templates put tools or system text there."""
        return self._shape(num_systems, has_tools)[1]

    def _shape(self, num_systems: int, has_tools: bool) -> tuple[str, bool]:
        shape = (min(num_systems, 2), has_tools)
        if shape not in self._shapes:
            self._shapes[shape] = self._probe(*shape)
        return self._shapes[shape]

    def _probe(self, num_systems: int, has_tools: bool) -> tuple[str, bool]:
        systems = [f"{SYSTEM.content}{place}" for place in range(num_systems)]
        tools = [TOOL] if has_tools else []
        refusal = "the template leaves it out"
        for form in _FORMS:
            try:
                before, after = self._split(form, systems, tools)
            except RefusalError as error:
                refusal = str(error)
                continue
            shown = [*systems, "zqfunctionqz"] if has_tools else systems
            if not all(part in before for part in shown):
                continue
            if after != self._framing.user_tail:
                break
            return form, not before.endswith(self._framing.user_opening)
        if not num_systems and not has_tools:
            raise UnsupportedModelError(f"the chat template cannot begin a conversation ({refusal}); give another one")
        raise InvalidMessagesError(
            f"the chat template cannot hold this system text or these tools ({refusal})",
            remedy="leave them out, or give another chat template",
            index=0 if num_systems else None,
        )

    def _split(self, form: str, systems: Sequence[str], tools: Sequence[object]) -> tuple[str, str]:
        """Render a head before a stub user message; return what is before and after the stub's content."""
        marked: list[object] = [self._encoder.mark(tool) for tool in tools]
        texts: list[str] = [self._encoder.mark(text) for text in systems]
        if marked and not self._template.has_tools:
            last = texts.pop() if texts else self._default_system
            texts.append("\n\n".join(filter(None, [last, hermes.tools_text(marked)])))
            marked = []
        if form == "merged":
            texts = ["\n\n".join(texts)] if texts else []
        user = USER.content
        if form == "folded":
            user, texts = "\n\n".join([*texts, user]), []
        entries: list[Entry] = [{"role": "system", "content": text} for text in texts]
        text = self._template.apply([*entries, {"role": "user", "content": user}], marked)
        before, found, after = text.rpartition(USER.content)
        if not found:
            raise RefusalError("the template leaves out the first user message")
        return before, after

    def _probe_default_system(self) -> str:
        """Return the system text that the template adds by itself, "" where there is none to be recognised.

        The Hermes form writes a system text of its own, which would silence it.
        """
        try:
            plain, _ = self._split("separate", [], [])
            start, found, stop = self._split("separate", [SYSTEM.content], [])[0].partition(SYSTEM.content)
        except RefusalError:
            return ""
        is_framed = found and len(plain) > len(start) + len(stop) and plain.startswith(start) and plain.endswith(stop)
        return plain[len(start) : -len(stop) or None] if is_framed else ""


def leading_systems(messages: Sequence[Message]) -> list[Message]:
    """Return the system messages that a conversation begins with."""
    systems: list[Message] = []
    for message in messages:
        if message.role is not Role.SYSTEM:
            break
        systems.append(message)
    return systems
