"""What precision costs and saves on real sessions: every assistant message scored, exact and settled, side by side.

    .venv/bin/python benchmarks/precision.py FILE.jsonl [--ids IDS.txt] [--policy int8 ...] [--dry] [--json OUT]

A policy is a tier, in which all closed turns are then stored (`int8`, `fp8`, `int4`, `int8/int4` for keys/values), or a
preset or policy file, of which only `[precision]` counts here: no turn is dropped. For each it prints the KL divergence
from the exact distribution over the next token, how often the likeliest token stays the same, the change of the
negative log-likelihood (all tokens, and those that are numbers or code), and the KV of settled turns as a ratio to
exact bf16, at the end of each session. A session that outruns the model's positions counts up to there.

The model computes in float32 here: in bf16 the rounding of its own activations answers any change at all, were it only
another order of a sum, with a KL divergence of some 0.001, and what a tier does would be lost in that.

`--dry` takes the account of KV alone, of all sessions, without the model's weights: nothing is computed, and positions
have no end.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from turnkv.cache import TierPlan
from turnkv.config import CacheConfig
from turnkv.conversation.spans import Classifier
from turnkv.engine import Engine, Session
from turnkv.errors import OutOfPositionsError, TurnKVError
from turnkv.evaluate.sessions import RecordedSession, load_sessions, read_ids
from turnkv.policy import FULL, Policy, Precision, load_policy, preset_names
from turnkv.types import EXACT, SpanClass, Tier

FRAGILE = (SpanClass.NUMBER, SpanClass.CODE)


@dataclass
class Tally:
    """What one policy did to the scored tokens, in order."""

    kl: list[float] = field(default_factory=list)
    is_same_top: list[bool] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    exact_nll: list[float] = field(default_factory=list)
    is_fragile: list[bool] = field(default_factory=list)
    settled_bytes: int = 0
    settled_exact_bytes: int = 0
    """What the same tokens take when they are exact."""
    settled_tokens: int = 0
    kept_tokens: int = 0
    """Those of the settled turns' that were left exact."""

    def add(self, other: "Tally") -> None:
        for name in ("kl", "is_same_top", "nll", "exact_nll", "is_fragile"):
            getattr(self, name).extend(getattr(other, name))
        for name in ("settled_bytes", "settled_exact_bytes", "settled_tokens", "kept_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def nll_change(self, *, only_fragile: bool = False) -> float:
        """Relative change of the mean negative log-likelihood; nan where no token counts."""
        chosen = [i for i, fragile in enumerate(self.is_fragile) if fragile or not only_fragile]
        exact = sum(self.exact_nll[i] for i in chosen)
        return sum(self.nll[i] for i in chosen) / exact - 1 if exact else float("nan")

    def memory(self) -> dict[str, float]:
        return {
            "settled_tokens": self.settled_tokens,
            "memory": self.settled_bytes / self.settled_exact_bytes,
            "kept_exact": self.kept_tokens / self.settled_tokens,
        }

    def summary(self) -> dict[str, float]:
        return self.memory() | {
            "tokens": len(self.kl),
            "kl": statistics.fmean(self.kl),
            "same_top": statistics.fmean(self.is_same_top),
            "nll_change": self.nll_change(),
            "fragile_tokens": sum(self.is_fragile),
            "fragile_nll_change": self.nll_change(only_fragile=True),
        }


def policy_of(name: str) -> Policy:
    """All closed turns in one tier, or the `[precision]` of a preset or file."""
    if name in preset_names() or Path(name).is_file():
        return Policy(name=name, precision=load_policy(name).precision)
    keys, _, values = name.partition("/")
    return Policy(name=name, precision=Precision(exact=(), rest=Tier(keys, values or keys)))


def compare(engines: dict[str, Engine], session: RecordedSession) -> Iterator[tuple[str, Tally]]:
    """Score one session under each policy, message by message beside the exact engine."""
    tallies = {name: Tally() for name in engines if name != FULL.name}
    held: dict[str, Session] = {}
    classifier = Classifier()
    for index in session.requests:
        rows: dict[str, Tensor] = {}
        try:
            for name, engine in engines.items():
                seen: list[Tensor] = []
                score = engine.score(session.messages[: index + 1], session.tools, observe=seen.append)
                held[name] = engine.session(score.session_id)
                rows[name] = torch.log_softmax(torch.cat(seen).float(), dim=-1)
        except OutOfPositionsError:  # the exact engine comes first, so none of the others has gone further
            break
        record = held[FULL.name].records[-1]
        body = torch.tensor(record.tokens[record.header_tokens :])
        spans = engines[FULL.name].renderer.spans(record.message, record.tokens, classifier)
        classes = [span.span_class for span in spans for _ in range(span.start, span.stop)][record.header_tokens :]
        exact = rows.pop(FULL.name)
        for name, tally in tallies.items():
            other = rows[name]
            tally.kl += (exact.exp() * (exact - other)).sum(dim=-1).tolist()
            tally.is_same_top += (exact.argmax(dim=-1) == other.argmax(dim=-1)).tolist()
            tally.nll += (-other.gather(1, body[:, None])[:, 0]).tolist()
            tally.exact_nll += (-exact.gather(1, body[:, None])[:, 0]).tolist()
            tally.is_fragile += [each in FRAGILE for each in classes]
    for name, tally in tallies.items() if held else ():
        account(engines[name], held[name], tally)
        if tally.settled_tokens:
            yield name, tally


def account(engine: Engine, session: Session, tally: Tally) -> None:
    """Count the bytes of what is settled when the session ends."""
    for record in session.records:
        if record.form == "exact":
            continue
        for part in (part for segment in record.segments for part in segment.parts):
            tally.settled_tokens += len(part)
            tally.settled_bytes += len(part) * page_bytes(engine, part.tier)
            tally.settled_exact_bytes += len(part) * page_bytes(engine, EXACT)
            tally.kept_tokens += len(part) if part.tier == EXACT else 0


def page_bytes(engine: Engine, tier: Tier) -> int:
    """Bytes of 16 tokens if the model computed in bf16."""
    precision = engine.policy.precision
    exact_layers = frozenset(() if precision is None else precision.exact_layers)
    return TierPlan.of(tier, engine.runner.shapes, torch.bfloat16, exact_layers).page_bytes


def settle_dry(engine: Engine, session: RecordedSession) -> Tally:
    """The account of one session under one policy."""
    tally = Tally()
    for index in session.requests:
        score = engine.score(session.messages[: index + 1], session.tools)
    account(engine, engine.session(score.session_id), tally)
    return tally


def show(name: str, found: dict[str, float], where: str) -> None:
    print(f"{where:42} {name:10} KV {found['memory']:.3f}  exact {found['kept_exact']:.1%}", end="", flush=True)
    if "kl" in found:
        print(
            f"  KL {found['kl']:.5f}  same top {found['same_top']:.2%}  NLL {found['nll_change']:+.3%}, "
            f"on {found['fragile_tokens']:,} number and code tokens {found['fragile_nll_change']:+.3%}",
            end="",
        )
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--ids", type=Path)
    parser.add_argument("--policy", nargs="+", default=["int8", "fp8", "int4", "int8/int4", "balanced", "lean"])
    parser.add_argument("--model")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cache = CacheConfig(budget_bytes=2**36) if arguments.dry else None
    base = Engine.load(arguments.model, dtype="float32", cache=cache, is_dry=arguments.dry, progress=print)
    if arguments.dry:
        base.runner.max_positions = None
    engines = {FULL.name: base} | {name: base.with_policy(policy_of(name)) for name in arguments.policy}
    total = {name: Tally() for name in arguments.policy}
    said = Tally.memory if arguments.dry else Tally.summary
    sessions = []
    ids = None if arguments.ids is None else read_ids(arguments.ids)
    for session in load_sessions(arguments.file, limit=arguments.limit, ids=ids):
        try:
            if arguments.dry:
                found = {name: settle_dry(engines[name], session) for name in arguments.policy}
            else:
                found = dict(compare(engines, session))
        except TurnKVError as error:
            print(f"{session.id:42} left out: {error}")
            continue
        finally:
            for engine in engines.values():
                engine.clear()
        for name, tally in found.items():
            total[name].add(tally)
            show(name, said(tally), session.id)
        sessions.append({"id": session.id} | {name: said(tally) for name, tally in found.items()})
    print()
    for name, tally in total.items():
        show(name, said(tally), f"{len(sessions)} sessions")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        summary = {name: said(tally) for name, tally in total.items()}
        arguments.json.write_text(json.dumps({"model": base.name, "total": summary, "sessions": sessions}, indent=1))


if __name__ == "__main__":
    main()
