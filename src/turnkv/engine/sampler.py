"""The sampler: from logits to the next token, by transformers' own logits processors."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from turnkv.config import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of a reply with its log-probability in nats, before temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest alternatives, likeliest first."""


class Sampler:
    """Chooses one request's tokens. Its random numbers are its own, so a batch changes nothing."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)
        processors = LogitsProcessorList()
        if not math.isclose(params.repetition_penalty, 1.0):
            processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        if params.temperature > 0:
            processors.append(TemperatureLogitsWarper(params.temperature))
            if params.top_k is not None:
                processors.append(TopKLogitsWarper(params.top_k))
            if params.top_p is not None:
                processors.append(TopPLogitsWarper(params.top_p))
            if params.min_p is not None:
                processors.append(MinPLogitsWarper(params.min_p))
        self._processors = processors

    def choose(self, logits: Tensor, history: list[int]) -> TokenLogprob:
        """Choose the token that follows `history`. logits: [V], any float dtype."""
        scores = logits.float().cpu()
        filtered = self._processors(torch.tensor([history]), scores[None])[0] if self._processors else scores
        if self.params.temperature == 0:
            token = int(filtered.argmax())
        else:
            weights = torch.softmax(filtered, dim=-1)
            token = int(torch.multinomial(weights, 1, generator=self._generator))
        if self.params.logprobs is None:
            return TokenLogprob(token, math.nan, ())
        logprobs = torch.log_softmax(scores, dim=-1)
        values, tokens = logprobs.topk(self.params.logprobs) if self.params.logprobs else (scores[:0], scores[:0])
        top = tuple((int(t), float(v)) for t, v in zip(tokens, values, strict=True))
        return TokenLogprob(token, float(logprobs[token]), top)
