"""The sockets on which processes listen, as the kernel lists them. Linux only."""

import ipaddress
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"  # the state, in /proc/net/tcp


def listening(pids: Iterable[int]) -> set[str]:
    """The addresses, without ports, on which one of these processes waits for connections."""
    own = {inode for pid in pids for inode in _inodes(pid)}
    addresses = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == LISTEN and inode in own:
                    addresses.add(_address(local.partition(":")[0]))
    return addresses


def _inodes(pid: int) -> set[str]:
    links = set()
    for entry in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile
            links.add(os.readlink(entry))
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def _address(words: str) -> str:
    """The kernel writes words of 32 bits in the machine's own order of bytes."""
    packed = b"".join(int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8))
    return str(ipaddress.ip_address(packed))
