"""Admission: a request gets a session, the policy's drops, and all the room it may need, or nothing at all."""

from turnkv.conversation.messages import Message
from turnkv.conversation.rendering import Renderer
from turnkv.conversation.turns import group_turns, head_length
from turnkv.engine.matching import best_match, head_key
from turnkv.engine.request import Admission, Generation, Request
from turnkv.engine.retention import Limits, Plan, plan_drops
from turnkv.engine.session import Record, Session
from turnkv.engine.table import SessionTable
from turnkv.errors import OutOfPositionsError, OverBudgetError
from turnkv.policy import Policy


def admit(
    request: Request, policy: Policy, table: SessionTable, renderer: Renderer, limits: Limits, model: str
) -> bool:
    """Prepare a request's session so that it can be computed to its end; False if room is short for now.

    Raises:
        InvalidMessagesError: the chat template cannot render a message.
        OutOfPositionsError, OverBudgetError: the conversation cannot be held even alone. Nothing has changed.
        UnknownSessionError: the request names a session that is not held.
    """
    try:
        session = _begin(request, table, renderer, policy, model)
        plan = plan_drops(session, policy, request.reply_room, limits)
        _refuse_overlong(request, session, plan, policy, limits)
    except BaseException:
        table.take_back(request)
        raise
    num_events = len(session.journal) + len(plan.drops)
    for drop in plan.drops:
        session.drop(drop.turn, drop.records, policy.name)
        request.dropped_turns.add(drop.turn)
    todo = session.pending()
    assert todo, "there is always a token to compute"
    needed = len(todo) + request.reply_room
    if not table.reserve(session, needed):
        table.take_back(request)
        return False
    if limits.max_positions is not None and session.next_position + needed > limits.max_positions:
        session.close_ranks(limits.max_positions)
    prompt = sum(len(record.tokens) for record in session.records)
    gone = sum(len(record.tokens) for record in session.records if record.is_dropped)
    request.admission = Admission(
        prompt_tokens=prompt,
        cached_tokens=prompt - gone - len(todo),
        computed_tokens=len(todo),
        dropped_tokens=gone,
        num_events=num_events,
    )
    if isinstance(request, Generation):
        request.history = [token for record in session.records for token in record.tokens]
    request.start(todo)
    table.touch(session)
    return True


def _begin(request: Request, table: SessionTable, renderer: Renderer, policy: Policy, model: str) -> Session:
    """Continue, fork or open a session, and append what the request brings; computes nothing."""
    num_systems = head_length(request.messages)
    systems, messages = request.messages[:num_systems], request.messages[num_systems:]
    header = renderer.generation_header(messages[-1])
    candidates = table if request.session_id is None else [table.get(request.session_id)]
    head = head_key(systems, request.tools)
    match = best_match(candidates, head, messages)
    num_known = 0 if match is None else match.num_messages
    if num_known == len(messages) and not header:
        num_known -= 1  # the reply's first logits come from the last message itself
    if match is not None and match.is_whole and num_known == match.num_messages:
        session = match.session
        request.num_records_before = len(session.records)
    else:
        session = table.create()
        if match is not None:
            session.fork_from(match.session, num_known + 1)
        else:
            session.open(model, policy.name)
            session.head_key = head
            session.records.append(Record(None, list(renderer.head(systems, request.tools))))
        request.num_records_before = 0
    session.is_busy = True
    request.session = session
    rendered = renderer.render(request.messages, request.tools, start=num_systems + num_known)
    for message, tokens in zip(messages[num_known:], rendered, strict=True):
        session.records.append(Record(message, list(tokens.tokens), tokens.header_tokens))
    session.records.append(Record(None, list(header), len(header)))
    return session


def _refuse_overlong(request: Request, session: Session, plan: Plan, policy: Policy, limits: Limits) -> None:
    """Shorten the reply's room where it alone is too much; refuse what cannot be held at all."""
    over = plan.total_tokens - limits.max_tokens
    if over > 0 and not request.shorten(over):
        raise OverBudgetError(
            f"{_where(session.messages)}: {plan.total_tokens:,} tokens of KV are needed, and the budget has room for "
            f"{limits.max_tokens:,}; raise the KV budget{_advice(policy)}"
        )
    if limits.max_positions is None:
        return
    can_fold = policy.window is not None and policy.window.overflow == "fold" and limits.can_shift
    over = plan.total_tokens - limits.max_positions
    if not limits.can_shift:
        end = session.next_position + len(session.pending()) + request.reply_room
        over = max(over, end - limits.max_positions)
    if over > 0 and not can_fold and not request.shorten(over):
        raise OutOfPositionsError(
            f"{_where(session.messages)}: the conversation needs {plan.total_tokens:,} positions and the model has "
            f"{limits.max_positions:,}; use a model with more positions{_advice(policy)}"
        )


def _where(messages: tuple[Message, ...]) -> str:
    return f"turn {group_turns(messages)[-1].index}"


def _advice(policy: Policy) -> str:
    if policy.window is None:
        return ', or a policy that drops turns, such as "window"'
    return ", shorten the message, or let the policy drop more"
