"""Token-exact conversations: the record of each, one turn with an engine, and many of them.

`tree` is one session, `dialogue` one turn, `conversation` what an environment is given, `store`
many sessions with their limits, `journal` what survives a restart; `server` speaks HTTP.
"""

from miles.session.conversation import SessionConversation
from miles.session.dialogue import turn
from miles.session.store import Sessions
from miles.session.tree import Session
from miles.session.turns import Counters, Prompt, Turn

__all__ = ["Counters", "Prompt", "Session", "SessionConversation", "Sessions", "Turn", "turn"]
