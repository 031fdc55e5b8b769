"""What a box's namespaces look like: the arguments of bubblewrap, and what must be there for it.

Starts nothing but `bwrap --version`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from miles_plugins.sandbox.process.seccomp import MACHINES

__all__ = [
    "EXPLAIN",
    "GROUP",
    "HOME",
    "PASSWD",
    "PATH",
    "arguments",
    "faults",
    "find_python",
    "kernel",
]

HOME = "/work"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_NOBODY = 65534
_OLDEST = (0, 8)
_INSTALL = "install it: apt-get install bubblewrap (Debian, Ubuntu) or dnf install bubblewrap"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (  # what programs look up and nobody keeps secret
    "alternatives", "ca-certificates", "ca-certificates.conf", "debian_version", "fonts",
    "gai.conf", "inputrc", "java-11-openjdk", "java-17-openjdk", "java-21-openjdk", "ld.so.cache",
    "ld.so.conf", "ld.so.conf.d", "localtime", "magic", "mime.types", "nsswitch.conf", "os-release",
    "perl", "pki/ca-trust", "protocols", "python3", "python3.11", "python3.12", "python3.13",
    "services", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone",
)  # fmt: skip
_SHARED_MEMORY = 16 << 20

PASSWD = f"nobody:x:{_NOBODY}:{_NOBODY}:nobody:{HOME}:/bin/sh\nroot:x:0:0:root:/root:/bin/sh\n"
GROUP = f"nogroup:x:{_NOBODY}:\nroot:x:0:\n"

_NAMESPACES = (
    "boxes need user namespaces for ordinary users; what may forbid them: sysctl "
    "user.max_user_namespaces=0, kernel.unprivileged_userns_clone=0 (Debian), "
    "kernel.apparmor_restrict_unprivileged_userns=1 (Ubuntu 24.04), or a container's seccomp "
    "profile (docker run --security-opt seccomp=unconfined)"
)
EXPLAIN = {
    "namespace": _NAMESPACES,
    "uid map": _NAMESPACES,
    "RTM_NEWADDR": _NAMESPACES,
    "Can't find source path": "folders that a box is given, its interpreter's among them, must be "
    "readable for the user nobody, and so must be all folders above them",
}
"""What to say beside what bubblewrap says."""


def faults() -> list[str]:
    """What keeps boxes from being made here, as sentences; empty when nothing is known to."""
    if not sys.platform.startswith("linux"):
        return [f"needs Linux; this is {sys.platform}"]
    if platform.machine() not in MACHINES:
        known = ", ".join(MACHINES)
        return [f"knows the system calls of {known}, not {platform.machine()}"]
    found = []
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        found.append(f"needs bubblewrap, which is not installed; {_INSTALL}")
    else:
        found += _too_old(bwrap)
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        found.append(
            "needs setpriv when root runs it, which is not installed; install it: "
            "apt-get install util-linux"
        )
    return found


def _too_old(bwrap: str) -> list[str]:
    try:
        version = _version(bwrap)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"cannot run {bwrap} --version: {error}"]
    if version >= _OLDEST:
        return []
    words = ".".join(map(str, version)) or "of no known version"
    return [f"needs bubblewrap 0.8 or later; {bwrap} is {words}"]


@lru_cache(maxsize=4)
def _version(bwrap: str) -> tuple[int, ...]:
    ran = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=30)
    return tuple(map(int, re.findall(r"\d+", ran.stdout)[:3]))


def kernel() -> tuple[int, ...]:
    """Version of the running kernel, its first two numbers."""
    return tuple(map(int, re.findall(r"\d+", platform.release())[:2]))


def find_python(chosen: str) -> tuple[str, str]:
    """An interpreter for boxes and the folder to show them for it, empty when that is shown anyway.

    The chosen one; else the system's, which is what commands find as `python3`; else the one that
    runs miles.
    """
    path = chosen or shutil.which("python3", path=PATH)
    if path is None:
        path = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    if any(Path(path).is_relative_to(folder) for folder in _SYSTEM):
        return path, ""
    return path, str(Path(path).resolve().parent.parent)


def arguments(
    *,
    id: str,
    label: str,
    disk_bytes: int,
    shown: Sequence[str],
    seccomp: int,
    files: Sequence[tuple[int, str]],
) -> list[str]:
    """Words of the command that a box's interpreter is appended to.

    `shown` are more folders it may read; `seccomp` and `files` (with their places) are descriptors
    that the command inherits.
    """
    words = []
    if os.geteuid() == 0:  # root in a user namespace still reads what root may read
        words = [
            shutil.which("setpriv") or "setpriv",
            f"--reuid={_NOBODY}",
            f"--regid={_NOBODY}",
            "--clear-groups",
        ]
    words += [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
    ]
    words += ["--uid", str(_NOBODY), "--gid", str(_NOBODY), "--hostname", id]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    words += ["--size", str(disk_bytes), "--tmpfs", "/"]
    for folder in (*_SYSTEM, *shown):
        if os.path.exists(folder):
            words += ["--ro-bind", folder, folder]
    words += ["--proc", "/proc", "--dev", "/dev"]
    words += ["--perms", "1777", "--size", str(_SHARED_MEMORY), "--tmpfs", "/dev/shm"]
    words += ["--remount-ro", "/dev", "--dir", HOME, "--perms", "1777", "--dir", "/tmp"]
    words += ["--tmpfs", "/etc"]
    for name in _ETC:
        if os.path.exists(f"/etc/{name}"):
            words += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    for fd, place in files:
        words += ["--ro-bind-data", str(fd), place]
    words += ["--remount-ro", "/etc", "--chdir", HOME, "--seccomp", str(seccomp)]
    # means nothing in the box; on the host, the command line is where `list` finds it
    return [*words, "--unsetenv", label]
