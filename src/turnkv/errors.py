"""Every error a user can meet. Each message says what is wrong and what to do about it."""


class TurnKVError(Exception):
    """Base of all errors that turnkv raises on purpose. The command line prints it without a traceback."""


class InvalidMessagesError(TurnKVError):
    """A conversation is malformed.

    Attributes:
        index: position of the offending message, or None where the list itself is wrong.
        field: dotted path inside that message, e.g. ``tool_calls[0].function.arguments``.
    """

    def __init__(self, problem: str, *, remedy: str, index: int | None = None, field: str | None = None) -> None:
        """Compose the sentence: where, what, remedy."""
        where = "messages" if index is None else f"messages[{index}]"
        if field is not None:
            where = f"{where}.{field}"
        super().__init__(f"{where}: {problem}; {remedy}")
        self.index = index
        self.field = field


class InvalidConfigError(TurnKVError):
    """A setting has a value that cannot work; the message names field, value and remedy."""

    def __init__(self, field: str, value: object, problem: str, *, remedy: str) -> None:
        """Compose the sentence: field, value, what, remedy."""
        super().__init__(f"{field} = {value!r}: {problem}; {remedy}")
        self.field = field
        self.value = value


class UnsupportedModelError(TurnKVError):
    """The model cannot be served faithfully; the message names the trait and the remedy."""


class ModelFilesError(TurnKVError):
    """A model's files are missing, broken or could not be fetched, converted or written."""


class OutOfPagesError(TurnKVError):
    """Fewer pages are free than asked for. The pool is unchanged."""


class OverBudgetError(TurnKVError):
    """A request cannot fit into the KV budget even alone. Refused before prefill; no state has changed."""


class OutOfPositionsError(TurnKVError):
    """A conversation has outrun the model's positions and the policy may drop nothing more. No state has changed."""


class UnknownSessionError(TurnKVError):
    """No session of this id is held by the engine."""


class UnknownTurnError(TurnKVError):
    """A turn that was named does not exist, or nothing may be done to it."""


class InvalidFileError(TurnKVError):
    """A file given by the user (sessions, policy, journal) cannot be read; the message names file and line."""
