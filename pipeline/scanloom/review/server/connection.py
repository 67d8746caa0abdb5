"""Connections of clients: limited in number, and closed if they send too slowly.

All processes of the machine can connect to the loopback address, whoever they belong to. Where the
limit is reached, the connection that has waited longest for a request is closed for the new one: a
program that only holds connections open bars nobody, and a browser whose idle connection is closed
opens another.
"""

from __future__ import annotations

import asyncio
import math
import resource
import socket
import time
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
"""Open connections; fewer if the process may have few open files."""
MAX_PER_PEER = 128
"""Of these, from one address: all of 127.0.0.1, or of a tunnel, count as one."""
BACKLOG = 64
"""Connections that wait to be accepted, and that are accepted at once."""
_FILES_PER_CONNECTION = 4
"""Share of the open files, of which reading cases needs some too."""
IDLE_SECONDS = 30.0
"""Time in which the head of a request must be complete, from the connection or the last answer."""


def max_connections() -> int:
    """Return the number of connections that may be open: `MAX_CONNECTIONS`, or fewer."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CONNECTIONS, max(8, files // _FILES_PER_CONNECTION))


class Listener(socket.socket):
    """A listening socket that limits the connections that are open.

    They count from the moment at which they are accepted: with TLS, before its handshake.

    Parameters
    ----------
    family : socket.AddressFamily
    limit, limit_per_peer : int
        Connections in all, and from one address.
    """

    def __init__(
        self,
        family: socket.AddressFamily,
        limit: int = MAX_CONNECTIONS,
        limit_per_peer: int = MAX_PER_PEER,
    ) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self.limit, self.limit_per_peer = limit, limit_per_peer
        self.open = dict[int, Accepted]()
        """Connections by their descriptor."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, for which another may be closed.

        Raises
        ------
        BlockingIOError
            If none waits, or all others are being answered: then this one is closed.
        """
        descriptor, address = self._accept()  # type: ignore[attr-defined]  # as `socket.accept` does
        accepted = Accepted(self, descriptor, str(address[0]))
        for peer, limit in ((accepted.peer, self.limit_per_peer), (None, self.limit)):
            others = [each for each in self.open.values() if peer in (None, each.peer)]
            if len(others) < limit:
                continue
            idle = min(others, key=lambda each: each.waits_since)
            if idle.waits_since == math.inf:
                accepted.close()
                raise BlockingIOError
            idle.end()
        self.open[descriptor] = accepted
        return accepted, address


class Accepted(socket.socket):
    """A connection of a `Listener`.

    Parameters
    ----------
    listener : Listener
    descriptor : int
    peer : str
        Address of the client.
    """

    def __init__(self, listener: Listener, descriptor: int, peer: str) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=descriptor)
        self.peer, self.waits_since = peer, time.monotonic()
        """Address, and moment since which no whole request is there; infinite during an answer."""
        self._listener, self._number = listener, descriptor

    def end(self) -> None:
        """End the connection: the server reads that it was closed."""
        self._forget()
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._forget()
        super().close()

    def _forget(self) -> None:
        if self._listener.open.get(self._number) is self:
            del self._listener.open[self._number]


class Connection(H11Protocol):
    """HTTP/1.1 connection that is closed if the head of a request does not arrive in time.

    uvicorn limits the time between two requests only, up to the first byte of the second. The time
    of a body is limited by `Guard`. Until it is complete, the connection may be closed for another
    one: else a few bytes of each of 128 bodies would bar everybody.
    """

    idle_seconds = IDLE_SECONDS
    _timer: asyncio.TimerHandle | None = None
    _unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as of uvicorn
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Stop the clock once the head of a request is there, and note when its body is."""
        super().data_received(data)
        self._stop_if_answering()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._wait()
        super().on_response_complete()  # which may begin with a request that is here already
        self._stop_if_answering()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop()
        self._note(time.monotonic())
        self._unsent = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(self.idle_seconds, self._late)

    def _stop_if_answering(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
            if not self.cycle.more_body:
                self._note(math.inf)

    def _note(self, waits_since: float) -> None:
        """Note on the socket since when the client's next request is waited for."""
        wrapped = self.transport.get_extra_info("socket")
        accepted = getattr(wrapped, "_sock", wrapped)  # asyncio hands out a wrapper
        if isinstance(accepted, Accepted):
            accepted.waits_since = waits_since

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if not unsent:
            self.transport.close()
        elif unsent < self._unsent:
            self._wait()  # the client still reads the answer
        else:
            self.transport.abort()
