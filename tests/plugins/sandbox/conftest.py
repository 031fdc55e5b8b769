"""Local servers that speak a vendor's protocol, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from miles import Context

VENDORS = Path(__file__).parent / "vendors"
KEY = "local-test-key"


@dataclass
class Vendor:
    """A server: where it is, and a handle on it."""

    url: str
    control: str

    def order(self, at: str, **fault: Any) -> None:
        """Let the next `times` requests of a sort go wrong: `status` (with `headers`), `reset`,
        `hang_s`, `die_s`; `after` does what was asked first, then waits `linger_s`."""
        self._ask("/fault", {"at": at, **fault})

    def reset(self) -> None:
        self._ask("/reset", {})

    def boxes(self) -> list[dict[str, Any]]:
        return self._ask("/")["boxes"]

    def asked(self, at: str) -> list[dict[str, Any]]:
        return [one for one in self._ask("/")["asked"] if one["at"] == at]

    def _ask(self, path: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self.control + path, body)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)


@dataclass(frozen=True)
class Kind:
    """How one component is pointed at its server."""

    package: str
    server: str
    cls: str
    environment: Callable[[str], Mapping[str, str]]
    secret: str
    config: Callable[[str], Mapping[str, Any]] = lambda url: {}


def _e2b(url: str) -> Mapping[str, str]:
    # without TLS there is no HTTP/2 for the SDK to agree on
    return {
        "E2B_API_KEY": KEY,
        "E2B_API_URL": url,
        "E2B_SANDBOX_URL": url,
        "E2B_HTTP_VERSION": "1.1",
    }


KINDS = {
    "daytona": Kind(
        "daytona",
        "daytona_server.py",
        "miles_plugins.sandbox.daytona:Daytona",
        lambda url: {"DAYTONA_API_KEY": KEY, "DAYTONA_API_URL": f"{url}/api"},
        "DAYTONA_API_KEY",
    ),
    "e2b": Kind("e2b", "e2b_server.py", "miles_plugins.sandbox.e2b:E2b", _e2b, "E2B_API_KEY"),
    "agentenv": Kind(
        "e2b",
        "e2b_server.py",
        "miles_plugins.sandbox.agentenv:Agentenv",
        lambda url: {"AGENT_KEY": KEY},
        "AGENT_KEY",
        lambda url: {"url": url, "box_url": url, "api_key_env": "AGENT_KEY"},
    ),
    "modal": Kind(
        "modal",
        "modal_server.py",
        "miles_plugins.sandbox.modal:Modal",
        lambda url: {
            "MODAL_TOKEN_ID": "ak-local",
            "MODAL_TOKEN_SECRET": KEY,
            "MODAL_SERVER_URL": url,
            "MODAL_CONFIG_PATH": "/nonexistent",
        },
        "MODAL_TOKEN_SECRET",
    ),
}


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[str], Vendor]]:
    """Servers by script, started when first asked for."""
    running: dict[str, tuple[subprocess.Popen[str], Vendor]] = {}

    def serve(script: str) -> Vendor:
        if script not in running:
            process = subprocess.Popen(
                [sys.executable, str(VENDORS / script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            where = json.loads(process.stdout.readline())
            running[script] = process, Vendor(**where)
        return running[script][1]

    yield serve
    for process, _ in running.values():
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


@dataclass
class Case:
    """One component, pointed at a fresh server."""

    name: str
    kind: Kind
    vendor: Vendor
    directory: Path

    @property
    def component(self) -> type:
        module, _, name = self.kind.cls.partition(":")
        return getattr(__import__(module, fromlist=[name]), name)

    def config(self, **changes: Any) -> Any:
        own = self.kind.config(self.vendor.url.removesuffix("/api"))
        return self.component.Config(**{**own, **changes})

    def sandbox(self, *, run: str = "a-run", **changes: Any) -> Any:
        around = Context(directory=self.directory / run)
        return self.component(self.config(**changes), around)


@pytest.fixture
def open_vendor(
    servers: Callable[[str], Vendor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[str], Case]:
    """By a component's name: its server without boxes or faults, and the environment that leads
    there."""

    def opened(name: str) -> Case:
        kind = KINDS[name]
        if find_spec(kind.package) is None:
            pytest.skip(f"the SDK {kind.package} is not installed (extra `sandboxes`)")
        vendor = servers(kind.server)
        vendor.reset()
        for key, value in kind.environment(vendor.url.removesuffix("/api")).items():
            monkeypatch.setenv(key, value)
        if kind.package == "modal":  # its client, with credentials, is made once a process
            from modal.client import _Client

            monkeypatch.setattr(_Client, "_client_from_env", None)
        return Case(name, kind, vendor, tmp_path)

    return opened


@pytest.fixture(params=["daytona", "e2b", "modal"])
def case(request: pytest.FixtureRequest, open_vendor: Callable[[str], Case]) -> Case:
    """Every vendor in turn."""
    return open_vendor(request.param)


@pytest.fixture(params=sorted(KINDS))
def named(request: pytest.FixtureRequest, open_vendor: Callable[[str], Case]) -> Case:
    """Every component in turn, also those that share a vendor's SDK."""
    return open_vendor(request.param)
