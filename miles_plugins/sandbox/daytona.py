"""The `daytona` sandbox: boxes at Daytona, hosted or one's own.

What Daytona's SDK is asked is `daytona_boxes`; the rest is the same for every provider.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from miles_plugins.sandbox.provider import Provider, RemoteConfig
from miles_plugins.sandbox.remote_sandbox import RemoteSandbox

__all__ = ["Daytona"]


class Daytona(RemoteSandbox):
    """Runs commands in boxes at Daytona, through its own SDK.

    Credentials and address are the SDK's: `DAYTONA_API_KEY` (or `DAYTONA_JWT_TOKEN` with
    `DAYTONA_ORGANIZATION_ID`), `DAYTONA_API_URL`, `DAYTONA_TARGET`. Every box carries the label
    `miles-run`; Daytona itself deletes it `lifetime_s` after it was made. Needs the
    `daytona` extra.
    """

    name = "daytona"
    package = "daytona"
    extra = "daytona"
    boxes = "miles_plugins.sandbox.daytona_boxes"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(RemoteConfig):
        image: str = ""
        """Container image to make boxes from; empty takes the snapshot."""
        snapshot: str = ""
        """Snapshot to make boxes from; empty is the organization's default."""
        cpu: int = 0
        """Cores of a box made from an image; 0 is the organization's default."""
        memory_gib: int = 0
        """Memory of a box made from an image; 0 is the organization's default."""
        disk_gib: int = 0
        """Disk of a box made from an image; 0 is the organization's default."""

    @classmethod
    def missing(cls, config: Config) -> list[str]:
        """The SDK reads the environment and the files `.env.local` and `.env` of the working
        directory."""
        from dotenv import dotenv_values

        faults = []
        if config.image and config.snapshot:
            faults.append(f"image ({config.image}) and snapshot ({config.snapshot}): choose one")
        if not config.image and (config.cpu or config.memory_gib or config.disk_gib):
            faults.append("cpu, memory_gib and disk_gib need an image; a snapshot brings its own")
        known = {**dotenv_values(".env"), **dotenv_values(".env.local"), **os.environ}
        token = known.get("DAYTONA_JWT_TOKEN") and known.get("DAYTONA_ORGANIZATION_ID")
        if not (known.get("DAYTONA_API_KEY") or token):
            faults.append(
                "no credentials: set DAYTONA_API_KEY, or DAYTONA_JWT_TOKEN and "
                "DAYTONA_ORGANIZATION_ID"
            )
        return faults

    def provider(self) -> Provider:
        """A client of the SDK."""
        from miles_plugins.sandbox.daytona_boxes import DaytonaBoxes

        return DaytonaBoxes(self._config)
