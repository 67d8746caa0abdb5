"""Connections of clients: those that send too slowly are closed."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_SECONDS = 30.0
"""Time in which the head of a request must be complete, from the connection or the last answer."""


class Connection(H11Protocol):
    """HTTP/1.1 connection that is closed if the head of a request does not arrive in time.

    uvicorn limits the time between two requests only, up to the first byte of the second. Bodies
    are limited by `Guard`.
    """

    idle_seconds = IDLE_SECONDS
    _timer: asyncio.TimerHandle | None = None
    _unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as of uvicorn
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Stop the clock once the head of a request is there."""
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
        self._unsent = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(self.idle_seconds, self._late)

    def _stop_if_answering(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()

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
