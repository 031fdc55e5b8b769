"""The `agentenv` sandbox: the E2B API at an address of one's own.

For services that speak E2B's protocol without being E2B; what is asked of them is `e2b_boxes`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from miles_plugins.sandbox.provider import Provider, RemoteConfig
from miles_plugins.sandbox.remote_sandbox import RemoteSandbox

__all__ = ["Agentenv"]


class Agentenv(RemoteSandbox):
    """Runs commands in boxes of a service that speaks the E2B API, through E2B's SDK.

    `url` is its control plane. Requests to a box go to `box_url`, one address for all boxes (each
    names its box in the header `E2b-Sandbox-Id`), or without one to `https://PORT-ID.DOMAIN` as at
    E2B. The key is read from the environment variable that `api_key_env` names. Needs the `e2b`
    extra.
    """

    name = "agentenv"
    package = "e2b"
    extra = "e2b"
    boxes = "miles_plugins.sandbox.e2b_boxes"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(RemoteConfig):
        url: str
        """Address of the control plane, such as `http://sandboxes.local:3000`."""
        box_url: str = ""
        """Address through which boxes are reached; empty derives one a box from `domain`."""
        domain: str = ""
        """Domain below which boxes have their addresses, when `box_url` is empty; empty is what
        the service says."""
        api_key_env: str = "E2B_API_KEY"
        """Environment variable that holds the key."""
        template: str = ""
        """Template to make boxes from; empty is `base`."""
        user: str = ""
        """User that commands run as; empty is the template's."""

    @classmethod
    def example_config(cls, directory: Path) -> Mapping[str, Any]:
        """For the contract suite: a service on this machine, where the environment says it is."""
        address = os.environ.get("AGENTENV_URL", "http://127.0.0.1:3000")
        return {"url": address, "box_url": os.environ.get("AGENTENV_BOX_URL", address)}

    @classmethod
    def missing(cls, config: Config) -> list[str]:
        """Addresses that are none, and the key."""
        faults = []
        for key, value in (("url", config.url), ("box_url", config.box_url)):
            parts = urlsplit(value)
            if (value or key == "url") and (
                parts.scheme not in ("http", "https") or not parts.netloc
            ):
                faults.append(f"{key}: {value!r} is no address; give http(s)://HOST[:PORT]")
        if not os.environ.get(config.api_key_env):
            faults.append(f"no credentials: set {config.api_key_env} to a key of {config.url}")
        return faults

    def provider(self) -> Provider:
        """E2B's SDK, pointed at the service."""
        from miles_plugins.sandbox.e2b_boxes import E2bBoxes

        config = self._config
        where = {"api_url": config.url.rstrip("/"), "api_key": os.environ[config.api_key_env]}
        if config.box_url:
            where["sandbox_url"] = config.box_url.rstrip("/")
        if config.url.startswith("http:") or config.box_url.startswith("http:"):
            where["http_version"] = "1.1"  # without TLS nobody agrees on another
        if config.domain:
            where["domain"] = config.domain
        return E2bBoxes(
            config,
            title=f"sandbox {self.name}",
            template=config.template,
            user=config.user,
            where=where,
        )
