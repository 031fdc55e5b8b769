"""The child process of a resources server: `python -m miles_plugin_nemo_gym.serve NAME OPTIONS`.

It reads a token from its standard input, says the port it listens on (loopback, chosen by the
system), answers only requests with that token, and ends when its standard input does: with the
process that started it, however that one ended.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

GRACE_S = 5.0


class Guarded:
    """An ASGI application that refuses requests without the token."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or answer 401 (a websocket: refuse it)."""
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            await receive()
            return await send({"type": "websocket.close", "code": 1008})
        await send({"type": "http.response.start", "status": 401, "headers": []})
        return await send({"type": "http.response.body", "body": b"wrong token"})


def made(name: str, options: dict[str, Any]) -> Any:
    """The application of a resources server of the package, set up without its launcher: by its
    class, the defaults of its own YAML, and `options`."""
    from nemo_gym.base_resources_server import SimpleResourcesServer
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import ServerClient
    from omegaconf import OmegaConf

    module = import_module(f"resources_servers.{name}.app")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, SimpleResourcesServer)
        and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise SystemExit(f"resources_servers.{name}.app has {len(found)} servers, not one")
    head = BaseServerConfig(host="127.0.0.1", port=0)
    client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
    given = {**defaults(name), **options, "name": name, "host": "127.0.0.1", "port": 0}
    config = found[0].model_fields["config"].annotation.model_validate(given)
    return found[0](config=config, server_client=client).setup_webserver()


def defaults(name: str) -> dict[str, Any]:
    """What the server's own YAML says of it, or no more than its entry point."""
    from omegaconf import OmegaConf

    folder = Path(next(iter(import_module(f"resources_servers.{name}").__path__))) / "configs"
    for path in sorted(folder.glob("*.yaml"), key=lambda p: (p.stem != name, p.stem)):
        for top in (OmegaConf.load(path) or {}).values():
            if name in (servers := top.get("resources_servers") or {}):
                return dict(OmegaConf.to_container(servers[name]))  # type: ignore[arg-type]
    return {"entrypoint": "app.py", "domain": "other"}


def main() -> None:
    """Serve until the standard input ends."""
    import uvicorn

    to_parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # into the log: nobody reads what the environment prints, and pipes fill up
    name, options = sys.argv[1], json.loads(sys.argv[2])
    token = sys.stdin.readline().strip()
    app = made(name, options)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Guarded(app, token), log_level="warning"))

    def watch() -> None:
        sys.stdin.read()
        server.should_exit = True
        threading.Event().wait(GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    print(listening.getsockname()[1], file=to_parent, flush=True)
    server.run(sockets=[listening])


if __name__ == "__main__":
    main()
