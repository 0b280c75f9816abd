import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.conversations import TOOLS, conversation, tiny_engine
from tests.families import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

from turnkv.cli.examples import example_files
from turnkv.engine import Engine, ModelRunner, Session
from turnkv.errors import InvalidFileError
from turnkv.evaluate.bootstrap import Sums, estimate
from turnkv.evaluate.evaluation import Evaluation, Task, run_tasks, summarise, tasks_of
from turnkv.evaluate.generated import arithmetic_items, leakage_items, text_items
from turnkv.evaluate.items import Item, load_items
from turnkv.evaluate.oneshot import Ours, OursHolding
from turnkv.policy import FULL, Keep, Policy, Precision, Window
from turnkv.types import Tier

IDENTITY = Policy(name="identity", window=Window(high=1000, low=1000))
NOTHING = Policy(name="nothing", window=Window(high=1, low=0, ranks="closed"), keep=Keep(recent=0))
NARROW = Policy(name="narrow", window=Window(high=3, low=1), keep=Keep(recent=0))
INT4 = Policy(name="int4", precision=Precision(exact=(), rest=Tier("int4", "int4")))
EXACT_TO = 1e-6


def lines() -> list[dict[str, Any]]:
    said = conversation(9)
    return [
        {"id": "session", "lang": "en", "messages": said, "tools": TOOLS},
        {
            "id": "recall",
            "lang": "en",
            "messages": said,
            "question": "What was thing 2?",
            "accepted_answers": ["74", "seventy-four"],
            "evidence_turns": [4],
        },
        {"id": "other", "lang": "en", "messages": said, "question": "And 3?", "accepted_answers": ["111"]},
        {
            "id": "call",
            "lang": "en",
            "messages": [*said, {"role": "user", "content": "Look at 5."}],
            "tools": TOOLS,
            "gold_calls": [{"name": "look", "arguments": {"n": 5}}],
        },
    ]


def write(path: Path, *entries: Any) -> Path:
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries), "utf-8")
    return path


@pytest.fixture
def items(tmp_path: Path) -> list[Item]:
    found, _ = load_items([write(tmp_path / "items.jsonl", *lines())])
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox is 12 years old. " * 250, "utf-8")
    return [
        *found,
        *arithmetic_items(1, 7),
        *leakage_items(found, 1, 7),
        *(replace(each, group="t") for each in text_items(text, 1)),
    ]


def evaluated(items: list[Item], *policies: Policy, step: int = 2048) -> dict[str, Any]:
    evaluation = evaluation_of(*policies, step=step)
    results = run_tasks(evaluation, tasks_of(items, ["oneshot", "online"]), None, {})
    return {"results": results, "summary": summarise(results, evaluation.names)}


def evaluation_of(*policies: Policy, step: int = 2048) -> Evaluation:
    return Evaluation(engines_of(*policies, step=step))


def engines_of(*policies: Policy, step: int = 2048) -> list[Engine]:
    engine = tiny_engine(step=step, budget_bytes=2**28)
    engine.runner.max_positions = None
    return engine.sharing([FULL, *policies])


def test_an_identity_policy_changes_no_metric(items: list[Item]) -> None:
    summary = evaluated(items, IDENTITY)["summary"]
    for protocol in ("oneshot", "online"):
        assert summary[protocol]["identity"].keys() == summary[protocol]["full"].keys()
        for name, found in summary[protocol]["identity"].items():
            if not name.startswith("ttft"):
                assert abs(found["change"]) < EXACT_TO, name
        assert summary[protocol]["identity"]["kl"]["value"] == pytest.approx(0, abs=EXACT_TO)
        assert summary[protocol]["identity"]["top1"]["value"] == 1


def test_a_policy_that_drops_everything_shows_the_loss_of_an_empty_history(items: list[Item]) -> None:
    # Nothing stands between two messages here, so that a question's tokens are the same whatever is before it.
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|im_end|>\n", "<|im_end|>")
    engine = Engine(ModelRunner(tiny_model("llama", "turnkv", torch.float32)), tokenizer, name="tiny")
    recall = next(item for item in items if item.id == "recall")
    empty = replace(recall, history=recall.history[:1], evidence=())
    dropped = Evaluation(engine.sharing([FULL, NOTHING])).run(Task("oneshot", recall))["subjects"]["nothing"]["metrics"]
    without = Evaluation(engine.sharing([FULL])).run(Task("oneshot", empty))["subjects"]["full"]["metrics"]
    assert dropped["recall_ll"][0] == pytest.approx(without["recall_ll"][0], abs=1e-4)
    assert dropped["recall_rank"] == without["recall_rank"]
    assert "recall_ll_dropped" in dropped
    assert dropped["kv_ratio"][0] == without["kv_ratio"][0]


def test_metrics_do_not_depend_on_the_step_or_the_order(items: list[Item]) -> None:
    once = evaluated(items, NARROW, INT4)["summary"]
    again = evaluated(items[::-1], NARROW, INT4, step=48)["summary"]
    for protocol, subjects in once.items():
        for subject, metrics in subjects.items():
            for name, found in metrics.items():
                if not name.startswith("ttft"):
                    assert again[protocol][subject][name]["value"] == pytest.approx(found["value"], rel=1e-4, abs=1e-5)


class Shifted(Ours):
    """A wrong cache: all keys but the newest message's are read one position off."""

    def hold(self, base: Session, item: Item) -> OursHolding:
        held = super().hold(base, item)
        view = held.session.view
        offsets = {entry.segment.key: entry.offset - 1 for entry in view.entries[:-2]}
        held.session.view = view.placed(offsets, view.next_position)
        return held


@pytest.mark.default_model
def test_a_cache_with_its_keys_one_position_off_is_caught_by_every_closeness_metric() -> None:
    # A model with random weights hardly knows positions; this one does.
    engines = Engine.load(dtype="float32").sharing([FULL, IDENTITY])
    wrong = Shifted(engines[1], engines[0])
    wrong.name = "shifted"
    [session, *_] = load_items(example_files())[0]
    evaluation = Evaluation(engines, [wrong])
    results = [evaluation.run(Task("oneshot", replace(session, history=session.history[:9])))]
    found = summarise(results, evaluation.names)["oneshot"]
    assert found["identity"]["kl"]["value"] < EXACT_TO
    assert found["shifted"]["kl"]["value"] > 50 * EXACT_TO
    assert abs(found["shifted"]["nll"]["change"]) > 10 * EXACT_TO
    assert found["shifted"]["top1"]["value"] < 1


def test_precision_and_windows_show_in_their_metrics(items: list[Item]) -> None:
    summary = evaluated(items, NARROW, INT4)["summary"]
    assert summary["online"]["narrow"]["kv_ratio"]["value"] < 0.8
    assert summary["oneshot"]["int4"]["kv_ratio"]["value"] < 0.5
    assert summary["oneshot"]["int4"]["text_nll_en"]["change"] != 0
    assert summary["online"]["narrow"]["kl"]["value"] > 0
    low, change, high = (summary["online"]["int4"]["kl"][name] for name in ("low", "change", "high"))
    assert low <= change <= high


def test_a_killed_run_continues_and_a_torn_line_is_computed_again(items: list[Item], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    tasks = tasks_of(items, ["oneshot"])
    whole = run_tasks(evaluation_of(NARROW), tasks, out, {"seed": 1})
    kept = out.with_name("out.json.unfinished")
    text = kept.read_text("utf-8").splitlines()
    assert len(text) == len(tasks)
    kept.write_text("\n".join(text[:3]) + "\n" + text[3][:40], "utf-8")

    class Counted(Evaluation):
        runs = 0

        def run(self, task: Task) -> dict[str, Any]:
            Counted.runs += 1
            return super().run(task)

    counted = Counted(engines_of(NARROW))
    again = run_tasks(counted, tasks, out, {"seed": 1})
    assert Counted.runs == len(tasks) - 3
    assert [timeless(each) for each in again] == [timeless(each) for each in whole]
    Counted.runs = 0
    run_tasks(counted, tasks, out, {"seed": 2})
    assert Counted.runs == len(tasks)


def timeless(result: dict[str, Any]) -> dict[str, Any]:
    subjects = {
        name: {metric: pair for metric, pair in found["metrics"].items() if not metric.startswith("ttft")}
        for name, found in result["subjects"].items()
    }
    return result | {"subjects": subjects}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{no json", "line|delimiter|name"),
        ({"id": "a"}, "needs an id and messages"),
        (lines()[0] | {"surprise": 1}, "unknown field 'surprise'"),
        ({"id": "a", "messages": [{"role": "user", "content": "x"}], "question": "?"}, "accepted_answers"),
        ({"id": "a", "messages": [{"role": "tool", "content": "x", "tool_call_id": "none"}]}, "call"),
        (lines()[1] | {"evidence_turns": [99]}, "evidence_turns"),
        (lines()[3] | {"gold_calls": ["look"]}, "gold_calls"),
    ],
)
def test_bad_lines_are_named_and_skipped_only_if_asked(line: Any, problem: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", lines()[2], line)
    with pytest.raises(InvalidFileError, match=problem) as caught:
        load_items([path])
    assert f"{path}:2" in str(caught.value)
    items, skipped = load_items([path], skip_bad=True)
    assert [item.id for item in items] == ["other"]
    assert [each.where for each in skipped] == [f"{path}:2"]


def test_an_item_that_the_model_cannot_hold_is_counted_and_not_measured(items: list[Item]) -> None:
    evaluation = Evaluation(tiny_engine(max_positions=300).sharing([FULL, NARROW]))
    result = evaluation.run(Task("oneshot", items[0]))
    assert "positions" in result["problem"]
    assert result["subjects"] == {}
    assert summarise([result], evaluation.names) == {}


def test_an_id_that_occurs_twice_is_bad(tmp_path: Path) -> None:
    path = write(tmp_path / "twice.jsonl", lines()[0], lines()[0])
    with pytest.raises(InvalidFileError, match="occurs twice"):
        load_items([path])


def test_wrong_calls_name_other_tools_and_values_of_the_same_conversation(items: list[Item]) -> None:
    call = next(item for item in items if item.kind == "toolcall")
    made = [message["tool_calls"][0]["function"] for (message,) in call.continuations]  # type: ignore[index]
    assert json.loads(made[0]["arguments"]) == {"n": 5}
    assert all(each != made[0] for each in made[1:])
    assert {json.loads(each["arguments"])["n"] for each in made[1:]} & {1, 3, 7}


def test_made_up_items_are_the_same_from_the_same_seed_and_right() -> None:
    [item] = arithmetic_items(1, 3)
    assert arithmetic_items(1, 3) == [item]
    assert arithmetic_items(1, 4) != [item]
    numbers = [json.loads(str(item.history[at]["content"]))["pieces"] for at in item.evidence]
    assert item.continuations[0][1]["content"] == str(numbers[0] + numbers[1] - numbers[2] + numbers[3])
    assert len({each[1]["content"] for each in item.continuations}) == len(item.continuations)


def test_a_secret_gains_nothing_where_it_was_never_told(items: list[Item]) -> None:
    leak = next(item for item in items if item.kind == "leakage")
    assert leak.twin is not None
    gains = evaluated([leak], NARROW)["results"][0]["subjects"]
    silent = evaluated([replace(leak, history=leak.twin, evidence=())], NARROW)["results"][0]["subjects"]
    assert silent["full"]["metrics"]["secret_gain"][0] == pytest.approx(0, abs=EXACT_TO)
    assert gains["full"]["metrics"]["secret_gain"][0] != 0


def test_the_interval_of_a_known_difference_holds_it_and_is_zero_without_one() -> None:
    import numpy as np  # noqa: PLC0415

    random = np.random.default_rng(1)
    under = np.full(200, 10.0)
    full = Sums(random.normal(20, 2, 200), under)
    found = estimate(Sums(full.over + random.normal(1, 0.5, 200), under), full, is_relative=False)
    assert found.low < 0.1 < found.high
    assert math.isclose(found.change, found.value - found.full)
    same = estimate(full, full, is_relative=True)
    assert (same.change, same.low, same.high) == (0, 0, 0)
