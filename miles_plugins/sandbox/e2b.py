"""The `e2b` sandbox: boxes at E2B, or a deployment of its open infrastructure.

What E2B's SDK is asked is `e2b_boxes`; the rest is the same for every provider. The same API at an
address of one's own is `agentenv`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from miles_plugins.sandbox.provider import Provider, RemoteConfig
from miles_plugins.sandbox.remote_sandbox import RemoteSandbox

__all__ = ["E2b"]


class E2b(RemoteSandbox):
    """Runs commands in boxes at E2B, through its own SDK.

    Credentials and address are the SDK's: `E2B_API_KEY`, `E2B_DOMAIN`. Every box carries the
    metadata `miles-run`; E2B itself ends it after `lifetime_s` (an hour at most in the free plan).
    Needs the `e2b` extra.
    """

    name = "e2b"
    package = "e2b"
    extra = "e2b"
    boxes = "miles_plugins.sandbox.e2b_boxes"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(RemoteConfig):
        template: str = ""
        """Template to make boxes from; empty is E2B's base template."""
        user: str = ""
        """User that commands run as; empty is the template's."""

    @classmethod
    def missing(cls, config: Config) -> list[str]:
        """The SDK reads its key from one environment variable."""
        if os.environ.get("E2B_API_KEY"):
            return []
        return ["no credentials: set E2B_API_KEY to a key of the account"]

    def provider(self) -> Provider:
        """The SDK with its own idea of address and key."""
        from miles_plugins.sandbox.e2b_boxes import E2bBoxes

        config = self._config
        return E2bBoxes(
            config, title=f"sandbox {self.name}", template=config.template, user=config.user
        )
