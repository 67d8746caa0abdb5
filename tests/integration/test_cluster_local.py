"""`--cluster local`: two workers, loopback only, closed to all who lack the run's key."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from scanloom.engine.clusters.connect import local_cluster
from support.cluster_runs import LOOPBACK, ClusterRun, http_answer, listeners
from support.formula_run import processes

ROUTES = (
    "/",
    "/status",
    "/json/counts.json",
    "/json/identity.json",
    "/info/main/workers.html",
    "/individual-plots.json",
    "/metrics",
    "/health",
    "/sitemap.json",
)


@pytest.fixture
def run(tmp_path: Path) -> ClusterRun:
    return ClusterRun(tmp_path, 6, 4.0, "{workers: 2, in_flight: 1}")


@pytest.mark.slow
def test_a_local_run_listens_on_loopback_alone_and_answers_nobody_without_its_key(
    run: ClusterRun,
) -> None:
    from distributed import Client
    from distributed.security import Security

    with run.going() as process:
        run.until(lambda: len(run.started) >= 2, "the first two scans")
        heard = listeners(run.notes)
        assert len(heard) >= 3  # a scheduler and two workers
        assert {address for address, _ in heard} <= set(LOOPBACK)

        requests = [(port, route) for _, port in heard for route in ROUTES]
        with ThreadPoolExecutor(16) as pool:
            assert set(pool.map(http_answer, *zip(*requests, strict=True))) == {
                ""
            }  # no server at all

        closed = [port for _, port in heard if refuses_strangers(port)]
        assert len(closed) >= 3
        strangers = (("tls", Security.temporary()), ("tcp", None))
        for protocol, security in strangers:
            with pytest.raises(OSError, match=r"does not match|imed out|refused|reset"):
                Client(f"{protocol}://127.0.0.1:{closed[0]}", security=security, timeout=3)
        run.check_end(process)
    assert set(run.started.values()) == {1}


def refuses_strangers(port: int) -> bool:
    """Whether a port speaks TLS and wants a certificate of whoever comes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), timeout=5.0) as line:
        try:
            with context.wrap_socket(line) as secure:
                secure.settimeout(5.0)
                secure.recv(1)
        except ssl.SSLError as exc:
            return "CERTIFICATE_REQUIRED" in (exc.reason or "")
        except OSError:
            return False
    return False


@pytest.mark.slow
def test_two_workers_share_the_scans_and_a_killed_one_is_replaced(run: ClusterRun) -> None:
    with run.going() as process:
        run.until(lambda: len(run.started) >= 2, "the first two scans")
        worker = next(p for p, command in processes(run.notes).items() if "spawn_main" in command)
        os.kill(worker, signal.SIGKILL)
        run.check_end(process)
    assert sum(run.started.values()) <= run.scans + 1


@pytest.mark.slow
def test_nothing_is_left_of_a_run_that_is_killed(run: ClusterRun) -> None:
    with run.going() as process:
        run.until(lambda: len(run.started) >= 2, "the first two scans")
        process.kill()
        process.wait()
        run.until(lambda: not processes(run.notes), "the end of all processes")


@pytest.mark.slow
def test_workers_that_are_killed_while_they_start_come_back(tmp_path: Path) -> None:
    with local_cluster(["", ""], 1, tmp_path) as client:
        for _ in range(6):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if "spawn_main" in " ".join(process.cmdline()):
                        process.kill()
            time.sleep(1.0)
        client.wait_for_workers(2, timeout=120)
        assert client.submit(os.getpid, pure=False).result(timeout=60) > 0
