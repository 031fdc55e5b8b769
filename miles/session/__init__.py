"""Token-exact conversations between an environment and an engine.

The in-process linear one lives in `miles.session.conversation`; nothing here talks to a network.
"""

from miles.session.conversation import LinearConversation

__all__ = ["LinearConversation"]
