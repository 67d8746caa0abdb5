"""Start the workers of a run on another machine.

``python -m scanloom.engine.clusters.remote_worker CONTACT [--tied]``

A batch job or an ssh session starts this program. It reads the run's contact file and starts
one Dask worker per GPU, or one for the CPU. The workers end with it: at a SIGTERM, when the run is
over, and with `--tied` at the end of its standard input.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from scanloom.core import keep_memory_private, settle_in
from scanloom.engine.clusters.contact import (
    ANY_LOOPBACK_PORT,
    PRELOAD,
    Contact,
    dask_configured,
)
from scanloom.engine.machine.devices import UNNUMBERED_DEVICES, visible_gpus, worker_environment
from scanloom.own_python import safe_path

_SCHEDULER_TIMEOUT_S = 60
"""Time that a worker waits for a scheduler that does not answer."""


def devices_here(contact: Contact) -> list[str]:
    """Return the GPU of each worker; "" for a worker that sees all GPUs of the machine, or none."""
    gpus = visible_gpus() if contact.device in UNNUMBERED_DEVICES else []
    count = contact.workers or len(gpus) or 1
    return [gpus[n % len(gpus)] for n in range(count)] if gpus else [""] * count


async def serve(contact: Contact, over: asyncio.Event) -> None:
    """Run this machine's workers until all of them have ended, or `over` is set."""
    from distributed import Nanny
    from distributed.security import Security

    security = Security(
        require_encryption=True,
        tls_ca_file=contact.certificate,
        tls_worker_cert=contact.certificate,
        tls_worker_key=contact.key,
    )
    options: dict[str, Any] = {
        "nthreads": contact.threads,
        "memory_limit": 0,
        "security": security,
        "dashboard_address": ANY_LOOPBACK_PORT,
        "preload": [PRELOAD],
        "death_timeout": _SCHEDULER_TIMEOUT_S,
        "interface": contact.interface,
    }
    if contact.lifetime is not None:
        options["lifetime"] = f"{contact.lifetime:.0f}s"
    devices = devices_here(contact)
    async with AsyncExitStack() as stack:
        nannies = []
        for device in devices:
            environment = worker_environment(device, devices)
            nanny = Nanny(contact.address, env=environment, **options)
            nannies.append(await stack.enter_async_context(nanny))
        ended = asyncio.gather(*(nanny.finished() for nanny in nannies))
        stopped = asyncio.ensure_future(over.wait())
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()


def main() -> None:
    """Run the workers of this machine."""
    sys.path[:] = safe_path(sys.path)
    keep_memory_private()
    settle_in()
    path = Path(sys.argv[1]).absolute()
    contact = Contact.read(path)
    with suppress(OSError):  # then only relative paths cannot be found
        os.chdir(contact.folder)
    with dask_configured(path.parent):
        asyncio.run(_serve_until_stopped(contact, tied="--tied" in sys.argv[2:]))


async def _serve_until_stopped(contact: Contact, *, tied: bool) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, over.set)
    if tied:

        def on_input() -> None:
            if not os.read(sys.stdin.fileno(), 4096):
                loop.remove_reader(sys.stdin.fileno())
                over.set()

        loop.add_reader(sys.stdin.fileno(), on_input)
    await serve(contact, over)


if __name__ == "__main__":
    main()
