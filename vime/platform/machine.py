"""Addresses, interfaces and shared memory of this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

import psutil

from vime.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def interface_of(host: str) -> str:
    """The network interface that has the address. Raises: ConfigError if none has."""
    # The loopback interface has all of 127.0.0.0/8, but lists one address.
    listed = "127.0.0.1" if is_loopback(host) else host
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == listed for address in addresses):
            return str(name)
    raise ConfigError(f"no network interface of this node has the address {host}; start Ray with --node-ip-address")


def shared_memory_id() -> str:
    """Equal in two processes exactly when they see the same /dev/shm: the boot, and the mounted file system."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{os.stat('/dev/shm').st_dev}"


def address_towards(host: str, port: int) -> str:
    """This node's address as `host` sees it."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect((host, port))  # sends nothing
        address: str = probe.getsockname()[0]
    return address
