"""How the line between rank 0 and the other ranks is laid: rank 0 waits at an address, the others come with a word."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import NvddError
from .channel import Channel
from .meeting import Place

_HELLO = struct.Struct("<16sI?")  # token, rank, whether this connection carries phases
Connections = tuple[socket.socket, socket.socket]  # one for messages, one for the phases of the rank that connects


class Invitation(NamedTuple):
    """Where rank 0 waits for the others, and the word by which it knows them."""

    hosts: tuple[str, ...]
    port: int
    token: bytes


def invite(one_host: bool) -> tuple[socket.socket, Invitation]:
    """Opens rank 0's end; on one host only to processes of that host."""
    if one_host:
        server = socket.create_server(("127.0.0.1", 0), backlog=512)
    elif socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", 0), backlog=512)
    hosts = [os.environ.get("MASTER_ADDR", ""), socket.getfqdn(), socket.gethostname()]
    with contextlib.suppress(OSError):
        hosts.append(socket.gethostbyname(socket.gethostname()))
    hosts = ["127.0.0.1"] if one_host else [host for host in dict.fromkeys(hosts) if host]
    return server, Invitation(tuple(hosts), server.getsockname()[1], secrets.token_bytes(16))


def accept(server: socket.socket, token: bytes, places: Sequence[Place], timeout: float) -> dict[int, Connections]:
    """Waits, on rank 0, until every other rank has made both of its connections."""
    found: dict[tuple[int, bool], socket.socket] = {}
    give_up = time.monotonic() + timeout
    try:
        while len(found) < 2 * (len(places) - 1):
            left = give_up - time.monotonic()
            missing = [p.rank for p in places[1:] if (p.rank, False) not in found or (p.rank, True) not in found]
            if left <= 0:
                raise NvddError(
                    f"ranks {missing} did not reach rank 0 on port {server.getsockname()[1]} in {timeout:g} s"
                )
            server.settimeout(left)
            try:
                sock, _ = server.accept()
            except TimeoutError:
                continue
            sock.settimeout(min(5.0, left))
            hello = _receive(sock)
            if hello is None or len(hello) != _HELLO.size:
                sock.close()
                continue
            word, rank, phases = _HELLO.unpack(hello)
            if not hmac.compare_digest(word, token) or not 0 < rank < len(places):
                sock.close()
                continue
            _say(sock, token)
            found[rank, phases] = sock
    finally:
        server.close()
    return {p.rank: _tuned(found[p.rank, False], found[p.rank, True]) for p in places[1:]}


def connect(invitation: Invitation, hub: Place, here: Place, timeout: float) -> Connections:
    """Opens both connections to rank 0, at the first of its addresses that answers with the right word."""
    give_up = time.monotonic() + timeout
    problems = []
    hosts = ("127.0.0.1", *invitation.hosts) if hub.shares_host(here) else invitation.hosts
    while time.monotonic() < give_up:
        problems = []
        for host in hosts:
            socks = []
            try:
                for phases in (False, True):
                    socks.append(socket.create_connection((host, invitation.port), timeout=min(10.0, timeout)))
                    _say(socks[-1], _HELLO.pack(invitation.token, here.rank, phases))
                    if _receive(socks[-1]) != invitation.token:
                        raise OSError("another program listens there")
                return _tuned(*socks)
            except OSError as error:
                problems.append(f"{host}: {error}")
                for sock in socks:
                    sock.close()
        time.sleep(0.2)
    raise NvddError(
        f"rank {here.rank} on {here.host} can't reach rank 0 on {hub.host}, port {invitation.port} "
        f"({'; '.join(problems)}): the hosts of a run must reach each other by TCP; export MASTER_ADDR=<an address of "
        f"{hub.host} that the others reach> if its name does not resolve"
    )


def _tuned(*pair: socket.socket) -> Connections:
    for sock in pair:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanishes says no goodbye
        for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return pair


def _say(sock: socket.socket, body: bytes) -> None:
    channel = Channel(sock)
    channel.queue(body)
    channel.flush()


def _receive(sock: socket.socket) -> bytes | None:
    """The first message on a new connection; None if there is none in time."""
    channel = Channel(sock)
    with contextlib.suppress(EOFError, OSError):
        while True:
            if messages := channel.receive():
                return messages[0].body
    return None
