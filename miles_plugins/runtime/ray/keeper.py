"""The part of a worker's actor that needs no ray: takes one connection that knows the token, starts
`miles.worker` on it, and says how that ended.

What the worker is asked goes through that connection, never through here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import ipaddress
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles import answer_with_stacks, keep_alive, log_tail, stacks_held, stacks_of
from miles_plugins.runtime.ray.files import unseen

__all__ = ["TOKEN_BYTES", "Keeper", "own_address"]

TOKEN_BYTES = 32
"""Length of what a caller sends before anything else."""

_GREETING_S = 2.0  # for a caller to show its token
_SIOCGIFADDR = 0x8915


class Keeper:
    """Listens at one address of its host, for one caller; then there is a worker process, which
    dies with this one."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        """`order` holds plain values: `name`, `title`, `token`, `log`, `address` (of this host) or
        `network`, `environment`, `directory` to run in, `files` that must be here, and `wait_s` for
        the caller."""
        answer_with_stacks()
        self._order = order
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._stopping = threading.Event()
        self._fault = ""
        self._ready: dict[str, Any] = {"host": socket.gethostname(), "fault": ""}
        self._ready["machine"] = f"{socket.gethostname()}/{_boot()}"
        # the kernel ties a child's end to the thread that started it: this one lives as long
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)
        if lacking := unseen(order["files"]):
            self._ready["fault"] = (
                f"{'; '.join(lacking)}: all hosts need one file system, mounted at the same place"
            )
            return
        try:
            self._address = own_address(order["address"], order["network"])
            family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
            self._listener = socket.create_server((self._address, 0), family=family, backlog=4)
        except OSError as error:
            self._ready["fault"] = f"it cannot listen for the driver: {error}"
            return
        self._ready |= {
            "address": self._address,
            "port": self._listener.getsockname()[1],
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
        self._thread.start()

    def ready(self) -> dict[str, Any]:
        """`host`, its name; `machine`, which tells it from others; `address` and `port` at which
        the caller is expected; `devices`, the GPUs that Ray reserved, or null; or a `fault`."""
        return self._ready

    def _keep(self) -> None:
        try:
            with self._listener:
                caller = self._greet()
            if caller is None:
                self._fault = f"nobody with its token called within {self._order['wait_s']:g} s"
                return
            with caller:
                self._process = self._start(caller)
            self._process.wait()
        except OSError as error:
            self._fault = f"the worker process could not be started: {error}"
        finally:
            self._ended.set()

    def _greet(self) -> socket.socket | None:
        """The first caller that sends the token."""
        until = time.monotonic() + self._order["wait_s"]
        self._listener.settimeout(0.2)
        while time.monotonic() < until and not self._stopping.is_set():
            try:
                caller, _ = self._listener.accept()
            except TimeoutError:
                continue
            caller.settimeout(_GREETING_S)
            try:
                said = caller.recv(TOKEN_BYTES, socket.MSG_WAITALL)
            except OSError:
                said = b""
            if hmac.compare_digest(said, self._order["token"].encode()):
                caller.settimeout(None)
                keep_alive(caller)
                return caller
            caller.close()
        return None

    def _start(self, caller: socket.socket) -> subprocess.Popen[bytes]:
        order = self._order
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}  # its token too
        environment = {
            **kept,
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **_interface(self._address),
            **order["environment"],
        }
        command = [sys.executable, "-P", "-m", "miles.worker", "--name", order["name"]]
        command += ["--fd", str(caller.fileno()), "--parent", str(os.getpid())]
        with open(order["log"], "ab") as output, stacks_held():
            output.write(f"--- {order['title']} on {socket.gethostname()}\n".encode())
            output.flush()
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(caller.fileno(),),
                start_new_session=True,
                cwd=order["directory"],
                env=environment,
            )

    def wait(self) -> dict[str, Any]:
        """Return when the worker has ended: its exit `code` (None: it never started), `fault`, and
        the last lines of its log."""
        self._ended.wait()
        code = None if self._process is None else self._process.returncode
        return {"code": code, "fault": self._fault, "tail": log_tail(Path(self._order["log"]))}

    def stacks(self) -> str:
        """What the worker is at, in words; all its stacks are in its log then."""
        if self._process is None:
            return "not started"
        return asyncio.run(stacks_of(self._process, Path(self._order["log"])))

    def end(self, grace_s: float) -> None:
        """Wait so long for the worker to end by itself, then kill it with its children."""
        self._stopping.set()
        if self._thread.ident is None:
            return
        self._ended.wait(grace_s)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # the session: its children too
        self._thread.join(grace_s + 5.0)


def _boot() -> str:
    """What the kernel calls this boot of the machine, shortened: host names repeat."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return "?"


def own_address(address: str, network: str) -> str:
    """The address to listen on: this one, or the host's own in a network. Raises `OSError` when it
    has none."""
    if not network:
        return address
    wanted = ipaddress.ip_network(network, strict=False)
    target = wanted[0] if wanted.num_addresses == 1 else wanted[1]
    family = socket.AF_INET6 if wanted.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((str(target), 9))  # sends nothing: the kernel only chooses where from
        found = str(sock.getsockname()[0])
    if ipaddress.ip_address(found) not in wanted:
        raise OSError(f"{socket.gethostname()} has no address in {network} (it has {found})")
    return found


def _interface(address: str) -> dict[str, str]:
    """Where gloo and NCCL are to talk: on the interface of this address."""
    if ipaddress.ip_address(address).is_loopback:
        return {"GLOO_SOCKET_IFNAME": "lo"}
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
        if socket.inet_ntoa(answer[20:24]) == address:
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {}
