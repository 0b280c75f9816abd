"""What the cache holds of a session, turn by turn, for `/turns`."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from turnkv.conversation.turns import Turn, group_turns
from turnkv.engine import Session
from turnkv.engine.retention import is_pinned
from turnkv.engine.session import Record
from turnkv.evaluate.quantities import MISSING, bytes_text, count_text
from turnkv.policy import Policy

_STYLES = {"open": "green", "pinned": "cyan", "dropped": "red", "partly dropped": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """One turn, or the head (`turn` None), as the session holds it now."""

    turn: int | None
    kind: str
    num_messages: int
    tokens: int
    """Of its messages, whatever became of them."""
    held_tokens: int
    held_bytes: int
    """Of its KV."""
    tier: str | None
    """How what is held is stored; None where nothing is."""
    age: int | None
    """In turns: 0 for the last."""
    state: str
    """`open`, `closed`, `pinned`, `dropped`, `partly dropped`; `kept` for the head."""


def turn_rows(session: Session, policy: Policy) -> list[TurnRow]:
    """The head and each turn, oldest first."""
    records = session.records[1:]
    turns = group_turns(session.messages)
    rows = [_row(session, None, "head", range(1), None, "kept")]
    for turn in turns:
        own = records[turn.start : turn.stop]
        age = len(turns) - 1 - turn.index
        state = _state(session, policy, turn, own, is_last=not age)
        rows.append(_row(session, turn.index, turn.kind.value, range(turn.start + 1, turn.stop + 1), age, state))
    return rows


def turn_table(session: Session, policy: Policy) -> Table:
    """The rows as a table, with totals."""
    rows = turn_rows(session, policy)
    held = sum(row.held_tokens for row in rows)
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    footers = (
        ("turn", "all"),
        ("kind", ""),
        ("messages", count_text(sum(row.num_messages for row in rows))),
        ("tokens", count_text(sum(row.tokens for row in rows))),
        ("held", count_text(held)),
        ("KV", bytes_text(sum(row.held_bytes for row in rows))),
        ("tier", ""),
        ("age", ""),
        ("state", ""),
    )
    for name, footer in footers:
        is_text = name in ("turn", "kind", "tier", "state")
        table.add_column(name, Text(footer), justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            MISSING if row.turn is None else str(row.turn),
            row.kind,
            MISSING if row.turn is None else count_text(row.num_messages),
            count_text(row.tokens),
            count_text(row.held_tokens),
            bytes_text(row.held_bytes),
            row.tier or MISSING,
            MISSING if row.age is None else str(row.age),
            Text(row.state, style=_STYLES.get(row.state, "")),
        )
    return table


def _row(session: Session, turn: int | None, kind: str, own: range, age: int | None, state: str) -> TurnRow:
    records = session.records[own.start : own.stop]
    tiers = {part.tier for record in records for segment in record.segments for part in segment.parts}
    return TurnRow(
        turn=turn,
        kind=kind,
        num_messages=sum(record.message is not None for record in records),
        tokens=sum(len(record.tokens) for record in records),
        held_tokens=sum(record.num_held for record in records),
        held_bytes=sum(map(session.record_bytes, own)),
        tier=" + ".join(sorted(map(str, tiers))) or None,
        age=age,
        state=state,
    )


def _state(session: Session, policy: Policy, turn: Turn, records: Sequence[Record], *, is_last: bool) -> str:
    gone = [record.is_dropped for record in records]
    if any(gone):
        return "dropped" if all(gone) else "partly dropped"
    if is_last:
        return "open"
    return "pinned" if is_pinned(session, policy, turn, session.messages) else "closed"
