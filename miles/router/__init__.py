"""Affinity: which engine, and which of its data-parallel ranks, answers a conversation.

`Router` is an engine over several engines. Nothing here renders messages, moves weights or starts
a process.
"""

from miles.router.accounts import summarize
from miles.router.router import Router

__all__ = ["Router", "summarize"]
