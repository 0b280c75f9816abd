"""What became of each turn of one session under each policy, and where a recorded answer became unlikely."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from turnkv.conversation.turns import group_turns
from turnkv.engine import Engine
from turnkv.evaluate.items import Item
from turnkv.evaluate.online import Account, replay_online
from turnkv.types import EXACT

NUM_FALLS = 5
"""Places shown where the likelihood fell most."""


def explain(engines: Sequence[Engine], item: Item, *, limit: int | None = None) -> Iterator[Table]:
    """Replay a session online; a table of turns and one of falls for each policy but the reference, the first."""
    accounts = replay_online(engines, item, limit=limit)
    for engine, account in list(zip(engines, accounts, strict=True))[1:]:
        if account.session_id is not None:
            yield _turns(engine, account)
            yield _falls(engine, account)


def _turns(engine: Engine, account: Account) -> Table:
    assert account.session_id is not None
    session = engine.session(account.session_id)
    table = Table(title=f"{item_name(engine)}: turns at the end", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("turn", "kind", "tokens", "state", "dropped at turn"):
        table.add_column(name, justify="left" if name in ("kind", "state") else "right")
    dropped_at = {turn: usage.turn for usage in account.usages for turn in usage.dropped_turns}
    for turn in group_turns(session.messages):
        records = session.records[turn.start + 1 : turn.stop + 1]
        tokens = sum(len(record.tokens) for record in records)
        gone = sum(len(record.tokens) for record in records if record.is_dropped)
        tiers: dict[str, int] = {}
        for part in (part for record in records for segment in record.segments for part in segment.parts):
            name = "exact" if part.tier == EXACT else str(part.tier)
            tiers[name] = tiers.get(name, 0) + len(part)
        held = ", ".join(f"{count:,} {name}" for name, count in tiers.items())
        state = "dropped" if gone == tokens else f"{'partly dropped, ' if gone else ''}held: {held}"
        table.add_row(str(turn.index), turn.kind.value, f"{tokens:,}", state, str(dropped_at.get(turn.index, "")))
    return table


def _falls(engine: Engine, account: Account) -> Table:
    table = Table(
        title=f"{item_name(engine)}: where replies became unlikely", box=box.SIMPLE_HEAD, title_justify="left"
    )
    for name in ("turn", "loss, nats a token", "worst token", "around it"):
        table.add_column(name, justify="right" if name in ("turn", "loss, nats a token") else "left")

    def loss(request: dict[str, object]) -> float:
        nll, full_nll = request["nll"], request["full_nll"]
        assert isinstance(nll, float)
        assert isinstance(full_nll, float)
        return nll - full_nll

    for request in sorted(account.requests, key=loss, reverse=True)[:NUM_FALLS]:
        worst = request["worst"]
        token, around = (worst["token"], worst["text"]) if isinstance(worst, dict) else ("", "")
        table.add_row(str(request["turn"]), f"{loss(request):+.3f}", Text(repr(token)), Text(str(around)))
    return table


def item_name(engine: Engine) -> str:
    """The policy as a title has it."""
    return engine.policy.describe()
