"""Processes named so that what they leave behind can be told from what is still theirs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from miles import process_alive, process_identity


def test_identity_of_this_process_is_alive() -> None:
    own = process_identity()
    assert re.fullmatch(r"[\w.-]+\.\d+\.\d+", own) and own.split(".")[-2] == str(os.getpid())
    assert process_alive(own) is True


def test_identity_of_a_process_that_ended_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    named = process_identity(child.pid)
    assert process_alive(named) is True
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not collected yet
    assert process_alive(named) is False
    child.communicate()
    assert process_alive(named) is False


def test_identity_tells_a_later_process_with_the_same_number() -> None:
    host, pid, start = process_identity().rsplit(".", 2)
    assert process_alive(f"{host}.{pid}.{int(start) - 1}") is False


@pytest.mark.parametrize("text", ["", "elsewhere.1.1", "x", "a.b.c", "ours with a letter"])
def test_identity_of_elsewhere_is_unknown(text: str) -> None:
    assert process_alive(text) is None
    assert process_alive(f"{process_identity()}{text}x") is None
