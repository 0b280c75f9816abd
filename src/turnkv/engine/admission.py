"""Admission: a request gets a session, the policy's drops, and all the room it may need, or nothing at all."""

from collections.abc import Sequence

from turnkv.conversation.messages import Message
from turnkv.conversation.rendering import Renderer
from turnkv.conversation.turns import group_turns, head_length
from turnkv.engine.journal import Open
from turnkv.engine.matching import Match, best_match, head_key
from turnkv.engine.request import Admission, Generation, Request
from turnkv.engine.retention import Limits, Plan, plan_drops
from turnkv.engine.session import Record, Session
from turnkv.engine.settling import Settler
from turnkv.engine.table import SessionTable
from turnkv.errors import OutOfPositionsError, OverBudgetError
from turnkv.policy import Policy
from turnkv.types import Role


def admit(  # noqa: PLR0913, PLR0917 - the engine's parts, none of which admission owns
    request: Request,
    policy: Policy,
    table: SessionTable,
    renderer: Renderer,
    settler: Settler,
    limits: Limits,
    model: str,
) -> bool:
    """Prepare a request's session so that it can be computed to its end; False if room is short for now.

    Raises:
        InvalidMessagesError: the chat template cannot render a message.
        OutOfPositionsError, OverBudgetError: the conversation cannot be held even alone. Nothing has changed.
        UnknownSessionError: the request names a session that is not held.
    """
    candidates = tuple(table) if request.session_id is None else (table.get(request.session_id),)
    try:
        # The second time afresh: drops leave holes in pages, so a session may not fit although its tokens would.
        for known in (candidates, ()):
            match = _find(request, known)
            if match is not None and not _settled(match.session, table, settler):
                if table.is_busy:
                    return False
                continue
            session = _begin(request, match, table, renderer, Open("", model, policy.name))
            plan = plan_drops(session, policy, request.reply_room, limits)
            _refuse_overlong(request, session, plan, policy, limits)
            if table.can_hold(session, plan, request.reply_room):
                break
            table.take_back(request)
        return _start(request, session, plan, policy, table, limits)
    except BaseException:
        table.take_back(request)
        raise


def _start(request: Request, session: Session, plan: Plan, policy: Policy, table: SessionTable, limits: Limits) -> bool:
    """Carry out the plan; False, and the session as before save for turns dropped, if room is short for now."""
    num_events = len(session.journal) + len(plan.drops)
    for drop in plan.drops:
        session.drop(drop.turn, drop.records, policy.name)
        request.dropped_turns.add(drop.turn)
    todo = session.pending()
    assert len(todo) == plan.new_tokens > 0, "there is always a token to compute"
    needed = len(todo) + request.reply_room
    if not table.reserve(session, needed):
        table.take_back(request)
        return False
    if policy.window is not None and policy.window.ranks == "closed" and limits.can_shift:
        session.close_ranks(None)
    elif limits.max_positions is not None and session.next_position + needed > limits.max_positions:
        session.close_ranks(limits.max_positions)
    prompt = sum(len(record.tokens) for record in session.records)
    gone = sum(len(record.tokens) for record in session.records if record.is_dropped)
    request.admission = Admission(
        prompt_tokens=prompt,
        cached_tokens=prompt - gone - len(todo),
        computed_tokens=len(todo),
        dropped_tokens=gone,
        num_events=num_events,
        settled_turns=tuple(session.settled_turns),
    )
    session.settled_turns = []
    if isinstance(request, Generation):
        request.history = [token for record in session.records for token in record.tokens]
    request.start(todo)
    table.touch(session)
    return True


def _find(request: Request, candidates: Sequence[Session]) -> Match | None:
    """The session that the request continues or forks."""
    num_systems = head_length(request.messages)
    key = head_key(request.messages[:num_systems], request.tools)
    return best_match(candidates, key, request.messages[num_systems:])


def _settled(session: Session, table: SessionTable, settler: Settler) -> bool:
    """Whether all that was due in a session is settled now."""
    return settler.settle(session, lambda num_bytes: table.make_room(num_bytes, keep=session))


def _begin(request: Request, match: Match | None, table: SessionTable, renderer: Renderer, opening: Open) -> Session:
    """Continue, fork or open a session, and append what the request brings; computes nothing."""
    num_systems = head_length(request.messages)
    systems, messages = request.messages[:num_systems], request.messages[num_systems:]
    header = renderer.generation_header(messages[-1])
    num_known = 0 if match is None else match.num_messages
    if num_known == len(messages) and not header:
        num_known -= 1  # the reply's first logits come from the last message itself
    # All that may be refused comes before anything changes.
    head = renderer.head(systems, request.tools) if match is None else ()
    rendered = renderer.render(request.messages, request.tools, start=num_systems + num_known)
    if match is not None and match.is_whole and num_known == match.num_messages:
        session = match.session
        request.num_records_before = len(session.records)
    else:
        session = table.create()
        if match is not None:
            session.fork_from(match.session, num_known + 1)
        else:
            session.open(opening.model, opening.policy)
            session.head_key = head_key(systems, request.tools)
            session.records.append(Record(None, list(head)))
        request.num_records_before = 0
    session.is_busy = True
    request.session = session
    for message, tokens in zip(messages[num_known:], rendered, strict=True):
        session.records.append(Record(message, list(tokens.tokens), tokens.header_tokens))
    session.records.append(Record(None, list(header), len(header)))
    return session


def _refuse_overlong(request: Request, session: Session, plan: Plan, policy: Policy, limits: Limits) -> None:
    """Shorten the reply's room where it alone is too much; refuse what cannot be held at all."""
    over_budget = -(-(plan.total.bytes - limits.max_bytes) // limits.token_bytes)
    over_positions = 0
    can_fold = policy.window is not None and policy.window.overflow == "fold" and limits.can_shift
    if limits.max_positions is not None and not can_fold:
        end = plan.total.tokens
        if not limits.can_shift:
            end = max(end, session.next_position + plan.new_tokens + request.reply_room)
        over_positions = end - limits.max_positions
    over = max(over_budget, over_positions)
    if over <= 0 or request.shorten(over):
        return
    if over == over_budget:
        raise OverBudgetError(
            f"{_where(session.messages)}: {plan.total.tokens:,} tokens would be held in {plan.total.bytes:,} bytes of "
            f"KV, and the budget has room for {limits.max_bytes:,}; raise the KV budget{_advice(policy)}"
        )
    raise OutOfPositionsError(
        f"{_where(session.messages)}: the conversation needs {over + (limits.max_positions or 0):,} positions and the "
        f"model has {limits.max_positions:,}; use a model with more positions{_advice(policy)}"
    )


def _where(messages: tuple[Message, ...]) -> str:
    """The turn that the reply would belong to."""
    return f"turn {group_turns((*messages, Message(Role.ASSISTANT, '')))[-1].index}"


def _advice(policy: Policy) -> str:
    if policy.window is None:
        return ', or a policy that drops turns, such as "window"'
    return ", shorten the message, or let the policy drop more"
