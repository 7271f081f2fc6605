"""Messages between the parent and one rank: length-prefixed bytes, with file descriptors, over a Unix socket."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import struct
import types
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import InputError

_HEADER = struct.Struct("<QB")  # bytes in the body, number of file descriptors
_MAX_FDS = 8
_CHUNK = 1 << 16
_MAIN = "__main__"


class Message(NamedTuple):
    """One message: its bytes, and the file descriptors that came with it (the receiver closes them)."""

    body: bytes
    fds: list[int]


class Channel:
    """One end of a connected Unix stream socket.

    The same code serves the parent, whose socket is non-blocking (one stopped rank must not block the others), and
    the rank, whose socket is blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._outgoing: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._incoming = bytearray()
        self._incoming_fds: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def queue(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Appends a message; ``fds`` must stay open until :meth:`flush` has returned True."""
        # The descriptors ride on the header's first byte, so the receiver never has a message before its descriptors.
        self._outgoing.append((memoryview(_HEADER.pack(len(body), len(fds))), fds))
        self._outgoing.append((memoryview(body), ()))

    def flush(self) -> bool:
        """Sends what the socket takes now; True when nothing is left. Raises ``EOFError`` if the other end is gone."""
        while self._outgoing:
            data, fds = self._outgoing[0]
            try:
                sent = socket.send_fds(self._socket, [data], fds) if fds else self._socket.send(data)
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError) as error:
                raise EOFError("the other end hung up") from error
            if sent == len(data):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (data[sent:], ())
        return True

    def receive(self) -> list[Message]:
        """Reads once and returns the messages that are complete; raises ``EOFError`` if the other end is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _CHUNK, _MAX_FDS)
        except BlockingIOError:
            return []
        except ConnectionResetError as error:
            raise EOFError("the other end hung up") from error
        self._incoming_fds += fds
        if not data:
            raise EOFError("the other end hung up")
        self._incoming += data
        return self._complete()

    def _complete(self) -> list[Message]:
        messages = []
        while len(self._incoming) >= _HEADER.size:
            size, n_fds = _HEADER.unpack_from(self._incoming)
            end = _HEADER.size + size
            if len(self._incoming) < end:
                break
            body = bytes(memoryview(self._incoming)[_HEADER.size : end])
            fds, self._incoming_fds = self._incoming_fds[:n_fds], self._incoming_fds[n_fds:]
            del self._incoming[:end]
            messages.append(Message(body, fds))
        return messages

    def close(self) -> None:
        for fd in self._incoming_fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._incoming_fds = []
        self._socket.close()


class _RankPickler(pickle.Pickler):
    """Refuses at once what a rank could not load: things defined in the user's script, which no rank runs."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ == _MAIN:
            raise InputError(
                f"{obj.__qualname__!r} is defined in the script or notebook itself, which the ranks do not run: "
                "move it to a module (a .py file beside the script) and import it from there"
            )
        return NotImplemented


def dumps_for_ranks(value: Any, what: str) -> bytes:
    """Pickles ``value`` for the ranks; ``what`` names it in the :class:`InputError` if that cannot be done."""
    buffer = io.BytesIO()
    try:
        _RankPickler(buffer, protocol=5).dump(value)
    except InputError as error:
        raise InputError(f"{what} can't be sent to the ranks: {error}") from None
    except Exception as error:  # pickle raises PicklingError, TypeError, AttributeError, or whatever __reduce__ does
        raise InputError(
            f"{what} can't be sent to the ranks, since it can't be pickled ({type(error).__name__}: {error}): "
            "give paths, names, numbers, arrays or importable classes, and build open files, locks, lambdas "
            "and the like inside the service"
        ) from error
    return buffer.getvalue()
