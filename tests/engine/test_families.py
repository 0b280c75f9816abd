import pytest
import torch
from tests.engine.conversations import TOOLS, conversation, reply_rows, score_all, tiny_engine
from tests.families import FAMILIES, NEAR_TIES, tiny_model
from tests.tolerances import LOGITS

from turnkv.config import SamplingParams
from turnkv.engine import Generation

LONG = [
    {"role": "system", "content": "Be brief, always."},
    {"role": "user", "content": "Tell me about the sea and what lives in it, if you please."},
    {"role": "assistant", "content": "It is wide and deep."},
    {"role": "user", "content": "And the sky?"},
    {"role": "assistant", "content": "It is wider."},
]


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("step", [2048, 64, 7, 1])
def test_teacher_forced_logits_equal_hugging_face_over_several_turns_in_any_chunks(family: str, step: int) -> None:
    engine = tiny_engine(family, step=step)
    score, got = score_all(engine, LONG)
    tokens, rows = reply_rows(engine, score.session_id)
    with torch.no_grad():
        want = tiny_model(family, "eager")(torch.tensor([tokens])).logits[0, rows]
    torch.testing.assert_close(got, want, atol=LOGITS, rtol=0)


def test_logits_do_not_depend_on_what_else_is_in_the_batch(family: str) -> None:
    engine = tiny_engine(family, step=16)
    others = [conversation(3, with_tools=False), LONG[:3]]
    rows: list[torch.Tensor] = []
    requests = [engine.scoring(other) for other in others]
    requests.insert(1, engine.scoring(LONG, observe=lambda logits: rows.append(logits.clone())))
    for request in requests:
        engine.submit(request)
    while not all(request.is_done for request in requests):
        engine.step()
    _, want = score_all(tiny_engine(family), LONG)
    torch.testing.assert_close(torch.cat(rows), want[-len(torch.cat(rows)) :], atol=LOGITS, rtol=0)


def test_greedy_tokens_equal_hugging_face_up_to_near_ties(family: str) -> None:
    engine = tiny_engine(family, step=32)
    reply = engine.respond(LONG[:2], sampling=SamplingParams(max_new_tokens=24))
    session = engine.session(reply.session_id)
    prompt = [token for record in session.records[:-1] for token in record.tokens]
    prompt += session.records[-1].tokens[: session.records[-1].header_tokens]
    model = tiny_model(family, "eager")
    near_ties = 0
    for token in reply.tokens:
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        if first - second <= 1e-3:
            near_ties += 1
            break
        assert int(logits.argmax()) == token
        prompt.append(token)
    NEAR_TIES[family] = (near_ties, len(reply.tokens))
    assert reply.tokens, "an empty reply would prove nothing"


def test_generating_while_another_session_prefills_changes_no_token() -> None:
    alone = tiny_engine().respond(LONG[:4], sampling=SamplingParams(max_new_tokens=16))
    engine = tiny_engine(step=8)
    first = engine.generation(LONG[:4], sampling=SamplingParams(max_new_tokens=16))
    engine.submit(first)
    for _ in range(9):
        engine.step()
    late: list[Generation] = []
    for rounds in (4, 2):
        late.append(engine.generation(conversation(rounds, with_tools=True)[:-1], TOOLS))
        engine.submit(late[-1])
    while not first.is_done:
        engine.step()
    assert engine.reply(first).tokens == alone.tokens
