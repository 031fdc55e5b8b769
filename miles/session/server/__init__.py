"""The session server: three APIs over token-exact sessions.

`make_app` is the application, `serve` runs it in the current event loop, `make_front` puts several
behind one address, `open_session` gives a session with the token that its agent is handed.
`miles.session` itself stays free of HTTP.
"""

from miles.session.server.app import make_app, open_session
from miles.session.server.serving import serve
from miles.session.server.spread import make_front

__all__ = ["make_app", "make_front", "open_session", "serve"]
