"""A seccomp filter as bytes: system calls that nothing in a box needs and that reach around its
limits.

What it refuses: new namespaces and mounts, tracing and reading other processes, kernel keys,
programs and modules, memory that no process is charged for (memfd, System V), `io_uring`, and
sockets of families that a network namespace does not hold back (vsock reaches a virtual machine's
host), and limiting or slowing the box's own supervisor. Everything else stays; isolation itself is
bubblewrap's.
"""

from __future__ import annotations

import errno
import platform
import struct

__all__ = ["MACHINES", "program"]

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machines that the filter is written for, with the kernel's names (AUDIT_ARCH) for them."""

_REFUSED = {  # name: number on x86_64, on aarch64
    "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41),
    "mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "fanotify_init": (300, 262), "syslog": (103, 116), "personality": (135, 92),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "quotactl": (179, 60), "acct": (163, 89),
    "quotactl_fd": (443, 443), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
}  # fmt: skip
_ABSENT = {  # as if the kernel had none: libraries then use what came before
    "clone3": (435, 435), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}  # fmt: skip
_OF_A_PROCESS = {  # name: numbers; the process is the first argument
    "prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274),
}  # fmt: skip
_CLONE, _PRCTL, _SOCKET = (56, 220), (157, 167), (41, 198)
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink: all of them end at the network namespace
_SUPERVISOR = 1  # its process id: whoever limits it can end the box, and the grading with it
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER: a command may not give up being its descendants' parent

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _FIRST, _SECOND = 0, 4, 16, 24  # offsets: number, machine, low halves of arguments
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def program(machine: str | None = None) -> bytes:
    """The filter for a machine, by default this one, as an array of `sock_filter`.

    Raises `KeyError` for a machine that is not in `MACHINES`.
    """
    machine = machine or platform.machine()
    column = list(MACHINES).index(machine) if machine in MACHINES else -1
    code = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, MACHINES[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NR),
    ]
    if machine == "x86_64":  # the x32 numbers name the same calls once more
        code += [_step(_AT_LEAST, 0x40000000, 0, 1), _step(_RETURN, _ERRNO | errno.ENOSYS)]
    for table, error in ((_REFUSED, errno.EPERM), (_ABSENT, errno.ENOSYS)):
        for numbers in table.values():
            code += [_step(_EQUAL, numbers[column], 0, 1), _step(_RETURN, _ERRNO | error)]
    code += _when(_CLONE[column], [
        _step(_LOAD, _FIRST),
        _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        _step(_RETURN, _ERRNO | errno.EPERM),
    ])  # fmt: skip
    code += _when(_PRCTL[column], [
        _step(_LOAD, _FIRST),
        _step(_EQUAL, _ADOPT, 0, 3),
        _step(_LOAD, _SECOND),
        _step(_EQUAL, 0, 0, 1),
        _step(_RETURN, _ERRNO | errno.EPERM),
    ])  # fmt: skip
    for numbers in _OF_A_PROCESS.values():
        code += _when(numbers[column], [
            _step(_LOAD, _FIRST),
            _step(_EQUAL, _SUPERVISOR, 0, 1),
            _step(_RETURN, _ERRNO | errno.EPERM),
        ])  # fmt: skip
    allowed = [_step(_EQUAL, family, len(_FAMILIES) - i, 0) for i, family in enumerate(_FAMILIES)]
    code += _when(_SOCKET[column], [
        _step(_LOAD, _FIRST),
        *allowed,
        _step(_RETURN, _ERRNO | errno.EAFNOSUPPORT),
    ])  # fmt: skip
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _when(number: int, body: list[bytes]) -> list[bytes]:
    """`body` for one system call; it falls through to allowing the call."""
    return [_step(_EQUAL, number, 0, len(body) + 1), *body, _step(_RETURN, _ALLOW)]


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)
