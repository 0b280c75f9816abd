"""What folding is worth where a conversation outruns the model's positions: NLL folded, and with positions run on.

    .venv/bin/python benchmarks/positions.py FILE.jsonl SESSION_ID [--model M]

The session must hold more tokens at once than the model has positions, even under the policy `window`: such as
tau2-telecom-e93263-036 of the shared data, whose system text and tools alone are 10,000 tokens, on the default model.
"""

import argparse
from pathlib import Path

from turnkv.engine import Engine
from turnkv.evaluate.replay import replay_session
from turnkv.evaluate.results import mean_nll
from turnkv.evaluate.sessions import load_sessions
from turnkv.policy import load_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("session")
    parser.add_argument("--model")
    arguments = parser.parse_args()
    [session] = load_sessions(arguments.file, ids=[arguments.session])
    engine = Engine.load(arguments.model, policy=load_policy("window"), progress=print)
    num_positions = engine.runner.max_positions
    for name, limit in ((f"folded into {num_positions} positions", num_positions), ("positions run on", None)):
        engine.runner.max_positions = limit
        result = replay_session(engine.with_policy(engine.policy), session)
        assert result.error is None, result.error
        print(f"{name}: {mean_nll(result.turns):.3f} nats per token over {len(result.turns)} replies", flush=True)


if __name__ == "__main__":
    main()
