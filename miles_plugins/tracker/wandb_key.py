"""Whether W&B would find an API key, by the places where it looks itself.

It says yes or no: no key is kept or returned. Nothing of the library is imported, so that a check
neither takes seconds nor asks at a terminal.
"""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["has_key"]

_CLOUD = ("api.wandb.ai", "api.forge.coreweave.com", "forge.coreweave.com")
"""Hosts of the service itself; which one is the default depends on the library's version."""
_SAGEMAKER = Path("/opt/ml/input/config/hyperparameters.json")


def has_key(variable: str) -> bool:
    """Whether there is a key in the environment (in `variable`, or where W&B expects one), in its
    settings files, or for its host in netrc. SageMaker brings keys in ways of its own: True."""
    named = (variable, "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    if any(os.environ.get(name) for name in named):
        return True
    if "SM_TRAINING_ENV" in os.environ or _SAGEMAKER.exists():
        return True
    stored = _settings()
    return bool(stored.get("api_key")) or _in_netrc(
        os.environ.get("WANDB_BASE_URL") or stored.get("base_url") or f"https://{_CLOUD[0]}"
    )


def _settings() -> Mapping[str, str]:
    """What `wandb login` and `wandb init` stored; a file that cannot be read holds nothing."""
    folder = _expanded(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb")
    stored: dict[str, str] = {}
    for file in (folder / "settings", Path("wandb/settings")):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(file)
            stored |= dict(parser.items("default"))
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
    return stored


def _in_netrc(url: str) -> bool:
    host = urlsplit(url).netloc
    # older versions of the library write and read an entry without the port
    hosts = _CLOUD if host in _CLOUD else (host, host.partition(":")[0])
    try:
        found = netrc.netrc(_netrc_file())
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError):
        return False
    entries = (found.authenticators(name) for name in hosts)
    return any(entry is not None and entry[2] for entry in entries)


def _netrc_file() -> Path:
    if named := os.environ.get("NETRC"):
        return _expanded(named)
    files = [_expanded(name) for name in ("~/.netrc", "~/_netrc")]
    return next((file for file in files if file.exists()), files[0])


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(path))  # where nobody has a home, pathlib raises
