"""`turnkv chat`: a conversation in the terminal, with the cache to look at and to edit."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from turnkv.cli.display import error_console, out_console, print_lines, say
from turnkv.cli.options import EngineOptions
from turnkv.cli.turns import turn_table
from turnkv.config import SamplingParams
from turnkv.engine import Engine, Reply, Usage
from turnkv.errors import TurnKVError
from turnkv.evaluate.quantities import bytes_text, count_text, ranges_text, seconds_text
from turnkv.policy import load_policy, preset_names
from turnkv.types import SessionId

_HELP = (
    "/turns          the cache, turn by turn",
    "/policy [NAME]  show the policy, or switch to a preset or a TOML file",
    "/drop N         drop turn N now",
    "/forget N       drop turn N and compute again what followed, so that no trace is left",
    "/pin N          spare turn N from drops; /unpin N takes that back",
    "/help           this list",
    "/quit           leave (Ctrl-D too); Ctrl-C cancels the reply",
)


def run_chat(options: EngineOptions, *, system: str | None, max_new_tokens: int, temperature: float) -> None:
    """Read lines and answer them until the input ends.

    Raises:
        TurnKVError: the model cannot be loaded; or, where no terminal is, a line could not be answered.
    """
    sampling = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
    engine = options.load_engine(say)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401, PLC0415 (gives `input` a history and line editing)

        say(f"{engine.name}, policy {engine.policy.describe()}. /help lists the commands.")
    chat = Chat(engine, system=system, sampling=sampling)
    failed: TurnKVError | None = None
    for line in _lines(is_terminal):
        try:
            if chat.take(line):
                break
        except TurnKVError as error:
            failed = error
            error_console().print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    if failed is not None and not is_terminal:
        raise TurnKVError("not every line could be answered")


class Chat:
    """The client's side of one conversation: its messages, and the session that holds their KV."""

    def __init__(self, engine: Engine, *, system: str | None, sampling: SamplingParams) -> None:
        self._engine = engine
        self._sampling = sampling
        self._messages: list[dict[str, object]] = [] if system is None else [{"role": "system", "content": system}]
        self._session_id: SessionId | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/turns": self._show_turns,
            "/policy": self._use_policy,
            "/drop": self._drop,
            "/forget": self._forget,
            "/pin": lambda turn: self._pin(turn, is_pinned=True),
            "/unpin": lambda turn: self._pin(turn, is_pinned=False),
            "/help": lambda _: print_lines(_HELP),
        }

    def take(self, line: str) -> bool:
        """Answer a line, or do what its command says; whether it was the last.

        Raises:
            TurnKVError: the line cannot be answered or followed. The conversation is as before.
        """
        name, _, argument = line.strip().partition(" ")
        if name in ("/quit", "/exit"):
            return True
        if name.startswith("/"):
            if name not in self._commands:
                raise TurnKVError(f"{name} is no command; /help lists them")
            self._commands[name](argument.strip())
        elif name:
            self._answer(line.strip())
        return False

    def _answer(self, text: str) -> None:
        messages: list[dict[str, object]] = [*self._messages, {"role": "user", "content": text}]
        reply = self._generate(messages)
        if reply is None:
            say("cancelled; your message was taken back")
            return
        self._messages = [*messages, reply.message.to_openai()]
        self._session_id = reply.session_id
        cut = f" · cut at {reply.usage.reply_tokens} tokens" if reply.finish_reason == "length" else ""
        out_console().print(usage_line(reply.usage) + cut, style="dim", markup=False, highlight=False)

    def _generate(self, messages: list[dict[str, object]]) -> Reply | None:
        """Stream a reply; None if it was cancelled. The session is then as before, save for turns dropped."""
        console = out_console()
        request = self._engine.generation(
            messages, sampling=self._sampling, session_id=self._session_id, on_text=lambda text: _write(console, text)
        )
        # Between steps, not in the middle of one: there the engine's state is whole.
        with _interrupts() as is_interrupted:
            try:
                self._engine.submit(request)
                while not request.is_done:
                    if is_interrupted():
                        return None
                    self._engine.step()
            finally:
                if not request.is_done:
                    self._engine.cancel(request)
                console.print()
        return self._engine.reply(request)

    def _show_turns(self, _: str) -> None:
        session = self._engine.session(self._held())
        out_console().print(turn_table(session, self._engine.policy))

    def _use_policy(self, name: str) -> None:
        if name:
            self._engine.policy = load_policy(name)
        others = ", ".join(preset_names())
        print_lines([self._engine.policy.describe() + ("" if name else f"   (presets: {others})")])

    def _forget(self, turn: str) -> None:
        num_tokens = self._engine.forget(self._held(), _number("/forget", turn))
        print_lines([f"forgot turn {turn}: {num_tokens:,} tokens; what followed is computed again at the next message"])

    def _drop(self, turn: str) -> None:
        num_tokens = self._engine.drop(self._held(), _number("/drop", turn))
        print_lines([f"dropped turn {turn}: {num_tokens:,} tokens; nothing was computed again"])

    def _pin(self, turn: str, *, is_pinned: bool) -> None:
        self._engine.pin(self._held(), _number("/pin" if is_pinned else "/unpin", turn), is_pinned=is_pinned)
        print_lines([f"turn {turn} is {'pinned' if is_pinned else 'no longer pinned'}"])

    def _held(self) -> SessionId:
        if self._session_id is None:
            raise TurnKVError("there are no turns yet; say something first")
        return self._session_id


def usage_line(usage: Usage) -> str:
    """What a reply cost, in one line."""
    parts = [
        f"cached {count_text(usage.cached_tokens)}",
        f"computed {count_text(usage.computed_tokens)}",
        f"dropped {count_text(usage.dropped_tokens)}",
        f"first token {seconds_text(usage.ttft_s)}",
        f"KV {bytes_text(usage.kv_bytes)}",
    ]
    if usage.dropped_turns:
        parts.append(f"dropped now: turn{'s' * (len(usage.dropped_turns) > 1)} {ranges_text(usage.dropped_turns)}")
    return " · ".join(parts)


def _lines(is_terminal: bool) -> Iterator[str]:
    """Lines of the terminal behind a prompt, or of a pipe."""
    if not is_terminal:
        yield from sys.stdin
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            out_console().print()
            return
        except KeyboardInterrupt:
            out_console().print()
            say("Ctrl-D or /quit leaves")


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Note Ctrl-C rather than raise it; a second one raises all the same."""
    is_interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt
        is_interrupted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: is_interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _write(console: Console, text: str) -> None:
    """A piece of a reply, at once and as it is: not wrapped, so that pieces join up."""
    console.out(text, end="", highlight=False)
    console.file.flush()


def _number(command: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise TurnKVError(f"{command} needs the number of a turn, as /turns shows it")
    return int(text)
