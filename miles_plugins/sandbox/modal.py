"""The `modal` sandbox: boxes at Modal.

What Modal's SDK is asked is `modal_boxes`; the rest is the same for every provider.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles_plugins.sandbox.provider import Provider, RemoteConfig
from miles_plugins.sandbox.remote_sandbox import RemoteSandbox

__all__ = ["Modal"]


class Modal(RemoteSandbox):
    """Runs commands in boxes at Modal, through its own SDK.

    Credentials are the SDK's: `MODAL_TOKEN_ID` and `MODAL_TOKEN_SECRET`, or the profile that
    `modal setup` stored. Every box carries the tag `miles-run` and belongs to the app `app`; Modal
    itself ends it after `lifetime_s` (a day at most). Needs the `modal` extra.
    """

    name = "modal"
    package = "modal"
    extra = "modal"
    boxes = "miles_plugins.sandbox.modal_boxes"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(RemoteConfig):
        app: str = "miles"
        """App that boxes belong to, made when it is not there."""
        image: str = ""
        """Container image in a registry; empty is Modal's Debian with Python."""
        cpu: float = 0.0
        """Cores to reserve; 0 is Modal's default."""
        memory_mib: int = 0
        """Memory to reserve; 0 is Modal's default."""

    @classmethod
    def missing(cls, config: Config) -> list[str]:
        """What the SDK reads from its environment or the profile."""
        from miles_plugins.sandbox.modal_boxes import has_credentials

        faults = [] if config.app else ["app: is empty"]
        if not has_credentials():
            faults.append(
                "no credentials: set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or run `modal setup`"
            )
        return faults

    def provider(self) -> Provider:
        """A client of the SDK."""
        from miles_plugins.sandbox.modal_boxes import ModalBoxes

        return ModalBoxes(self._config)
