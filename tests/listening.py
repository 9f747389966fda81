"""Who listens where, from the kernel's own tables; and, as a program, a rank that says so of itself and its launcher."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from pathlib import Path

LISTEN = "0A"


def listening(pids: list[int]) -> list[str]:
    """Addresses (HOST:PORT) of the TCP sockets at which these processes listen."""
    mine = {inode for pid in pids for inode in sockets_of(pid)}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN and words[9] in mine:
                found.append(readable(words[1]))
    return sorted(found)


def sockets_of(pid: int) -> set[str]:
    """Inodes of a process's sockets; none when it has gone."""
    inodes = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            target = os.readlink(entry.path)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except FileNotFoundError:
        pass
    return inodes


def readable(address: str) -> str:
    """``0100007F:1F90`` is 127.0.0.1:8080: words of four bytes in the machine's order."""
    host, port = address.split(":")
    words = struct.pack(f"={len(host) // 8}I", *(int(host[i : i + 8], 16) for i in range(0, len(host), 8)))
    return f"{socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)}:{int(port, 16)}"


def beyond_loopback(addresses: list[str]) -> list[str]:
    """Those that another machine could reach."""
    return [a for a in addresses if not ipaddress.ip_address(a.rpartition(":")[0]).is_loopback]


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    pids = [pid]
    for parent in pids:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            pids += [int(child) for child in task.read_text().split()]
    return pids


if __name__ == "__main__":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    print(*listening([os.getpid(), os.getppid()]), flush=True)
    dist.destroy_process_group()
