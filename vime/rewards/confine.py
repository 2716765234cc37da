"""Keeps a grader's hands off the run's other processes, where the kernel can: Linux with Landlock.

Graders see what a model wrote and may be led to run it. Their environment is clean, but every process of a user may
read /proc/PID/environ and the memory of that user's others, and end them. A process in a Landlock domain may do so with
the processes of its own domain alone; of root, which may read more, the capabilities for that are given up.
"""

from __future__ import annotations

import ctypes
import os

# <linux/landlock.h>; the numbers of the calls are the same on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1
_ACCESS_FS_REFER = 1 << 13
_SCOPE_SIGNAL = 1 << 1
_SIGNALS_SINCE, _REFER_SINCE = 6, 2
_PR_SET_NO_NEW_PRIVS = 38
# <linux/capability.h>: what lets root look into any process whatever Landlock says.
_CAPABILITY_VERSION = 0x20080522
_CAP_SYS_PTRACE, _CAP_SYS_ADMIN, _CAP_PERFMON = 19, 21, 38


class _RulesetAttr(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneathAttr(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int32))


class _CapSets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def landlock_version() -> int:
    """Of the kernel's interface; 0 where it has none."""
    version = ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    return max(0, int(version))


def confine() -> bool:
    """Put this process, and all it starts, into a domain of its own; files and network stay as they are.

    Returns: whether the kernel has done so. From version 6 of Landlock on, signals to others are refused as well.
    Raises: OSError if it can and does not.
    """
    version = landlock_version()
    if version < _REFER_SINCE:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    # Moving files between folders is refused in every domain that says anything of files, unless it is allowed.
    scopes = version >= _SIGNALS_SINCE
    attr = _RulesetAttr(0 if scopes else _ACCESS_FS_REFER, 0, _SCOPE_SIGNAL if scopes else 0)
    size = ctypes.sizeof(attr) if scopes else ctypes.sizeof(ctypes.c_uint64)
    ruleset = _checked(libc.syscall(_CREATE_RULESET, ctypes.byref(attr), ctypes.c_size_t(size), 0))
    try:
        if not scopes:
            root = os.open("/", os.O_PATH | os.O_CLOEXEC)
            rule = _PathBeneathAttr(_ACCESS_FS_REFER, root)
            _checked(libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0))
            os.close(root)
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))  # nor is anything gained by starting a program
        _give_up(libc, _CAP_SYS_PTRACE, _CAP_SYS_ADMIN, _CAP_PERFMON)
        _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return True


def _give_up(libc: ctypes.CDLL, *capabilities: int) -> None:
    header, sets = _CapHeader(_CAPABILITY_VERSION, 0), (_CapSets * 2)()
    _checked(libc.capget(ctypes.byref(header), sets))
    for capability in capabilities:
        half, kept = sets[capability // 32], ~(1 << capability % 32)
        half.effective, half.permitted = half.effective & kept, half.permitted & kept
        half.inheritable &= kept
    _checked(libc.capset(ctypes.byref(header), sets))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result
