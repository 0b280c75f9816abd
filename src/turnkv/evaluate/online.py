"""The protocol `online`: a session is replayed request by request and the policy acts at every turn, as in use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from turnkv.conversation.spans import Classifier
from turnkv.engine import Engine, Usage
from turnkv.errors import OutOfPositionsError, OverBudgetError
from turnkv.evaluate.items import Item
from turnkv.evaluate.scoring import Pair, Scored, closeness, divergence, reply_of, score_of, worst_place
from turnkv.types import SessionId

MAX_TEXT = 400
"""Characters of a reply that a result keeps."""


@dataclass
class Account:
    """What one policy did to one session."""

    usages: list[Usage] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    requests: list[dict[str, object]] = field(default_factory=list)
    session_id: SessionId | None = None
    num_drops: int = 0


def replay_online(
    engines: Sequence[Engine], item: Item, *, limit: int | None = None, progress: Callable[[], None] = lambda: None
) -> list[Account]:
    """Score every request of a session under each engine's policy, message by message; the first is the reference.

    A session that outruns what the reference can hold counts up to there. The engines hold the sessions afterwards.
    """
    accounts = [Account() for _ in engines]
    session = item.session()
    classifier = Classifier()
    for index in session.requests[:limit]:
        row: list[tuple[Usage, Scored]] = []
        try:
            for engine, account in zip(engines, accounts, strict=True):
                seen: list[Tensor] = []
                score = engine.score(
                    session.messages[: index + 1], session.tools, session_id=account.session_id, observe=seen.append
                )
                account.session_id = score.session_id
                reply = reply_of(engine, engine.session(score.session_id), classifier)
                row.append((score.usage, score_of(reply, torch.cat(seen))))
        except (OutOfPositionsError, OverBudgetError):
            if row:
                raise  # the reference holds most, so it is the first that cannot go on
            break
        for engine, account, (usage, scored) in zip(engines, accounts, row, strict=True):
            _note(account, engine, usage, scored, row[0][1])
        progress()
    return accounts


def _note(account: Account, engine: Engine, usage: Usage, scored: Scored, full: Scored) -> None:
    account.usages.append(usage)
    account.scored.append(scored)
    account.num_drops += bool(usage.dropped_turns)
    count = len(scored.reply.tokens)
    account.requests.append(
        {
            "turn": usage.turn,
            "num_drops": account.num_drops,
            "kv_bytes": usage.kv_bytes,
            "ttft_s": usage.ttft_s,
            "computed_tokens": usage.computed_tokens,
            "nll": float(scored.nll.sum()) / count,
            "full_nll": float(full.nll.sum()) / count,
            "kl": float(divergence(scored, full).sum()) / count,
            "tokens": count,
            "dropped_turns": list(usage.dropped_turns),
            "text": scored.reply.text[:MAX_TEXT],
            "worst": worst_place(engine, scored, full),
        }
    )
    # Only the likelihoods are needed from here on; a vocabulary's rows of a whole session would fill the memory.
    account.requests[-1]["pairs"] = closeness([scored], [full])
    account.scored.clear()


def online_metrics(account: Account, full: Account) -> dict[str, Pair]:
    """What a policy did to a session."""
    found: dict[str, Pair] = {}
    for request in account.requests:
        pairs = request.pop("pairs")
        assert isinstance(pairs, dict)
        for name, (over, under) in pairs.items():
            before = found.get(name, (0.0, 0.0))
            found[name] = (before[0] + over, before[1] + under)
    usages, count = account.usages, len(account.usages)
    peak, full_peak = (max(usage.kv_bytes for usage in each) for each in (usages, full.usages))
    found["kv_ratio"] = (peak, full_peak)
    found["kv_peak_bytes"] = (peak, 1.0)
    found["kv_mean_ratio"] = (sum(usage.kv_bytes for usage in usages), sum(usage.kv_bytes for usage in full.usages))
    found["ttft_s"] = (sum(usage.ttft_s for usage in usages), count)
    after = [usage.ttft_s for usage in usages if usage.dropped_turns]
    if after:
        found["ttft_after_drop_s"] = (sum(after), len(after))
    found["computed_tokens"] = (sum(usage.computed_tokens for usage in usages), count)
    return found
