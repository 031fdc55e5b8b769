"""The session server: three APIs over token-exact sessions.

`make_app` is the application, `serve` runs it in the current event loop, `open_session` gives a
session with the token that its agent is handed. `miles.session` itself stays free of HTTP.
"""

from miles.session.server.app import make_app, open_session
from miles.session.server.serving import serve

__all__ = ["make_app", "open_session", "serve"]
