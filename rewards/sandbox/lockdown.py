"""What a process gives up before it runs model-written code (Linux). Standard library only: it is loaded by path.

Three layers, none of which needs privileges: resource limits; Landlock (no file outside the given folders can be opened,
no TCP, no signals to others); seccomp with a list of allowed system calls (no sockets, no processes or threads, no
signals, no program start, no ptrace). Whatever is not on the list fails with "Operation not permitted".
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Sequence

X86_64, AARCH64 = 0xC000003E, 0xC00000B7
MACHINES = {"x86_64": X86_64, "aarch64": AARCH64}
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
IOCTLS = (0x5401, 0x5421, 0x5451)
"""TCGETS, FIONBIO, FIOCLEX: what opening a stream asks. Others could type into a terminal."""

# Numbers by name: (x86_64, aarch64); None where that machine has no such call.
CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None),
    "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "access": (21, None), "select": (23, None),
    "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None),
    "nanosleep": (35, 101), "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172),
    "exit": (60, 93), "uname": (63, 160), "fcntl": (72, 25), "ftruncate": (77, 46), "getcwd": (79, 17),
    "readlink": (89, None), "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165),
    "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175),
    "getegid": (108, 177), "getppid": (110, 173), "sigaltstack": (131, 132), "gettid": (186, 178), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "restart_syscall": (219, 128),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94),
    "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "set_robust_list": (273, 99), "dup3": (292, 24), "getrandom": (318, 278), "statx": (332, 291), "rseq": (334, 293),
    "faccessat2": (439, 439),
}  # fmt: skip
WRITING_CALLS: dict[str, tuple[int | None, int | None]] = {
    "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "rmdir": (84, None), "fsync": (74, 82), "fdatasync": (75, 83),
    "umask": (95, 166),
}  # fmt: skip
OPENAT, IOCTL = (257, 56), (16, 29)
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | getattr(os, "O_TMPFILE", 0)

READ_FILE, READ_DIR = 1 << 2, 1 << 3
"""Landlock's rights to open a file for reading and to list a folder."""
FILE_RIGHTS = 0b111 | 1 << 14
"""Those that also apply to a single file: execute, write, read, truncate."""


def limit_resources(memory_mb: int, cpu_seconds: int, file_mb: int) -> None:
    """Address space, processor seconds, size of a file, open files; no core dump, no new process of this user."""
    file_bytes = file_mb << 20
    for what, amount in (
        (resource.RLIMIT_AS, memory_mb << 20), (resource.RLIMIT_CPU, cpu_seconds), (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 0),
    ):  # fmt: skip
        hard = resource.getrlimit(what)[1]
        value = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(what, (value, value))


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it ends."""
    libc().prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)


def landlock_abi() -> int:
    """The kernel's Landlock version; 0 where there is none."""
    return max(0, libc().syscall(LANDLOCK_CREATE, None, 0, 1))


def restrict_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Landlock: open nothing but what lies under these paths. OSError where the kernel has no Landlock."""
    abi = landlock_abi()
    if not abi:
        raise OSError("this kernel has no Landlock")
    handled = (1 << 13) - 1 | (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0) | (1 << 15 if abi >= 5 else 0)
    # struct landlock_ruleset_attr: files, then (version 4) TCP bind and connect, then (6) abstract sockets and signals.
    attributes = struct.pack("QQQ", handled, 0b11, 0b11)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    rules = _checked(libc().syscall(LANDLOCK_CREATE, attributes, len(attributes), 0))
    everything = handled & ~(1 << 0) & ~(1 << 15)
    for paths, rights in ((readable, READ_FILE | READ_DIR), (writable, everything)):
        for path in paths:
            if not os.path.exists(path):
                continue
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights if os.path.isdir(path) else rights & FILE_RIGHTS
            _checked(libc().syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed & handled, folder), 0))
            os.close(folder)
    _checked(libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc().syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def restrict_calls(*, writing: bool) -> None:
    """Seccomp: only the calls above. OSError on a machine whose numbers are not known, or a kernel without seccomp."""
    if platform.machine() not in MACHINES or sys.maxsize < 2**32:
        raise OSError(f"the system calls of {platform.machine()} are not known here")
    _checked(libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    program = _filter(platform.machine(), writing=writing)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    _checked(libc().prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(header, len(header)), 0, 0))


def _filter(machine: str, *, writing: bool) -> bytes:
    """The list as classic BPF over struct seccomp_data: number at 0, machine at 4, low halves of arguments at 16 + 8 i."""
    index = list(MACHINES).index(machine)
    allow, kill = _instruction(0x06, 0x7FFF0000), _instruction(0x06, 0x80000000)
    refuse, no_access = _instruction(0x06, 0x00050000 | 1), _instruction(0x06, 0x00050000 | 13)  # EPERM, EACCES
    program = [_load(4), _instruction(0x15, MACHINES[machine], 1, 0), kill, _load(0)]
    calls = {**CALLS, **(WRITING_CALLS if writing else {}), **({"openat": OPENAT} if writing else {})}
    for numbers in calls.values():
        number = numbers[index]
        if number is not None:
            program += [_instruction(0x15, number, 0, 1), allow]
    if not writing:  # openat for reading: none of the flags that write
        number = OPENAT[index]
        program += [_instruction(0x15, number, 0, 4), _load(32), _instruction(0x45, WRITE_FLAGS_MASK, 0, 1), no_access]
        program += [allow]
    program += [_instruction(0x15, IOCTL[index], 0, len(IOCTLS) * 2 + 1), _load(24)]
    for request in IOCTLS:
        program += [_instruction(0x15, request, 0, 1), allow]
    return b"".join([*program, refuse])


WRITE_FLAGS_MASK = WRITE_FLAGS & ~os.O_DIRECTORY
"""O_TMPFILE contains O_DIRECTORY, with which folders are listed; its other bit is enough to tell it."""


def _instruction(code: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, constant)


def _load(offset: int) -> bytes:
    return _instruction(0x20, offset)


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def lock(settings: dict) -> None:
    """Apply all three layers as ``settings`` say; with ``weak`` go on where the kernel lacks one of the last two."""
    die_with_parent()
    writing = settings["file_mb"] > 0
    limit_resources(settings["memory_mb"], settings["cpu_seconds"], settings["file_mb"])
    folders = [settings["folder"]]
    for restrict in (
        lambda: restrict_files([*settings["readable"], *folders], folders if writing else []),
        lambda: restrict_calls(writing=writing),
    ):
        try:
            restrict()
        except OSError:
            if not settings["weak"]:
                raise
