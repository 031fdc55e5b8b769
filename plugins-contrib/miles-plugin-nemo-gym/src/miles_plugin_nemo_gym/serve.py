"""A resources server in a process of its own: `python -m miles_plugin_nemo_gym.serve NAME OPTIONS`.

How such a process starts, listens and ends is `miles.ChildServer`'s business.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from miles import ChildServer, serve_child

__all__ = ["defaults", "made", "server_of"]


def server_of(name: str, options: str, log: Path) -> ChildServer:
    """The server of that name and those options (JSON), one for all of this process; `log` is where
    a new one writes."""
    who = f"environment nemo_gym: the server {name}"
    return ChildServer.of("miles_plugin_nemo_gym.serve", name, options, who=who, log=log)


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


if __name__ == "__main__":
    serve_child(lambda: made(sys.argv[1], json.loads(sys.argv[2])))
