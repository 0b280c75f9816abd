"""What span classes cost and find: classification of whole sessions, in tokens a second, and the share of each class.

    .venv/bin/python benchmarks/spans.py FILE.jsonl [--limit N] [--prefill] [--json OUT]

`--prefill` also measures how fast the default model computes a prompt of 1,024 tokens, three times, and prints the
classification's time as a share of the median.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path

from turnkv.conversation.messages import Message, parse_messages
from turnkv.conversation.spans import Classifier
from turnkv.conversation.turns import head_length
from turnkv.engine import Engine
from turnkv.evaluate.sessions import load_sessions
from turnkv.types import SpanClass

PROMPT_TOKENS = 1024


def prefill_rate(engine: Engine) -> float:
    """Prompt tokens a second."""
    rates = []
    for number in range(3):
        messages = [{"role": "user", "content": f"{number} " + "word " * PROMPT_TOKENS}]
        reply = engine.score([*messages, {"role": "assistant", "content": "Yes."}])
        rates.append(reply.usage.computed_tokens / reply.usage.ttft_s)
        engine.clear()
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--model")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    engine = Engine.load(arguments.model, is_dry=not arguments.prefill, progress=print)
    renderer, classifier = engine.renderer, Classifier()
    counts: Counter[tuple[str, SpanClass]] = Counter()
    seconds, found = 0.0, []
    for session in load_sessions(arguments.file, limit=arguments.limit):
        messages = parse_messages(session.messages, allow_open_calls=True)
        systems = head_length(messages)
        head = renderer.head(messages[:systems], session.tools)
        pieces: list[tuple[Message | None, tuple[int, ...], int]] = [(None, head, 0)]
        for message, rendered in zip(messages[systems:], renderer.render(messages, session.tools), strict=True):
            pieces.append((message, rendered.tokens, rendered.header_tokens))
        started = time.perf_counter()
        spans = [renderer.spans(message, tokens, classifier, header) for message, tokens, header in pieces]
        seconds += time.perf_counter() - started
        for span in (span for each in spans for span in each):
            counts[span.role.value, span.span_class] += span.stop - span.start
        found.append(session.id)
    total = counts.total()
    print(f"{len(found)} sessions, {total:,} tokens in {seconds:.2f} s: {total / seconds:,.0f} tokens/s")
    for role in sorted({role for role, _ in counts}):
        own = {each: counts[role, each] for each in SpanClass if counts[role, each]}
        shares = "  ".join(f"{each} {count / sum(own.values()):.1%}" for each, count in own.items())
        print(f"  {role:10} {sum(own.values()) / total:6.1%} of all: {shares}")
    classes = {str(each): sum(count for (_, own), count in counts.items() if own is each) / total for each in SpanClass}
    print("  all roles: " + "  ".join(f"{name} {share:.1%}" for name, share in classes.items()))
    result: dict[str, object] = {"tokens": total, "tokens_per_s": total / seconds, "shares": classes}
    if arguments.prefill:
        rate = prefill_rate(engine)
        result["prefill_tokens_per_s"] = rate
        print(f"prefill: {rate:,.0f} tokens/s, so classification takes {rate * seconds / total:.2%} of its time")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
