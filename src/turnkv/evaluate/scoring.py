"""Scoring: how likely a cache makes recorded messages, token by token, and how far that lies from the full cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnkv.conversation.spans import Classifier
from turnkv.engine import Engine, Session
from turnkv.types import SpanClass

Pair = tuple[float, float]
"""A numerator and a denominator, to be summed apart."""

CLASSES = (SpanClass.TOOL_CALL, SpanClass.NUMBER, SpanClass.CODE)
NUM_AROUND = 6
"""Tokens shown on either side of one that became unlikely."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An assistant message as tokens; T of them are scored, the closing ones included."""

    tokens: tuple[int, ...]
    classes: tuple[SpanClass, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Scored:
    """A reply under one cache."""

    reply: Reply
    logprobs: Tensor
    """[T, V] float32, natural logarithm: of every token of the vocabulary, not of the reply's alone."""

    @property
    def nll(self) -> NDArray[np.float64]:
        """[T] nats."""
        wanted = torch.tensor(self.reply.tokens)
        return -self.logprobs.gather(1, wanted[:, None])[:, 0].double().numpy()


def score_of(reply: Reply, logits: Tensor) -> Scored:
    """A reply's score from the logits [T, V] that predict its tokens."""
    return Scored(reply, torch.log_softmax(logits.float(), dim=-1))


def reply_of(engine: Engine, session: Session, classifier: Classifier) -> Reply:
    """The last message that a session holds."""
    record = session.records[-1]
    assert record.message is not None
    spans = engine.renderer.spans(record.message, record.tokens, classifier)
    classes = [span.span_class for span in spans for _ in range(span.start, span.stop)]
    body = tuple(record.tokens[record.header_tokens :])
    return Reply(body, tuple(classes[record.header_tokens :]), engine.decode(body))


def closeness(ours: Sequence[Scored], full: Sequence[Scored]) -> dict[str, Pair]:
    """Likelihood of replies and its distance from the full cache's, over the tokens of all."""
    found: dict[str, list[float]] = {}

    def add(name: str, over: float, under: float) -> None:
        pair = found.setdefault(name, [0.0, 0.0])
        pair[0] += over
        pair[1] += under

    for each, reference in zip(ours, full, strict=True):
        nll, count = each.nll, len(each.reply.tokens)
        add("nll", float(nll.sum()), count)
        for span_class in CLASSES:
            is_class = np.array([one is span_class for one in each.reply.classes], dtype=bool)
            if is_class.any():
                add(f"nll_{span_class}", float(nll[is_class].sum()), float(is_class.sum()))
        add("kl", float(divergence(each, reference).sum()), count)
        add("top1", float((each.logprobs.argmax(-1) == reference.logprobs.argmax(-1)).sum()), count)
    return {name: (over, under) for name, (over, under) in found.items()}


def divergence(ours: Scored, full: Scored) -> NDArray[np.float64]:
    """[T] nats: the Kullback-Leibler divergence of a cache's next token from the full cache's."""
    each = (full.logprobs.exp() * (full.logprobs - ours.logprobs)).sum(-1)
    return each.double().numpy()


def worst_place(engine: Engine, ours: Scored, full: Scored) -> Mapping[str, object] | None:
    """Where a reply became most unlikely against the full cache; None where it nowhere did by a tenth of a nat."""
    loss = ours.nll - full.nll
    at = int(loss.argmax())
    if loss[at] < 0.1:
        return None
    around = ours.reply.tokens[max(0, at - NUM_AROUND) : at + NUM_AROUND + 1]
    return {"text": engine.decode(around), "token": engine.decode([ours.reply.tokens[at]]), "loss": float(loss[at])}
