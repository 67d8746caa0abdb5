"""`--cluster ssh` through a real sshd on loopback.

SCANLOOM_SSH names its options for the client, as a YAML list: `[-p, "2222", -i, key, ...]`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from support.cluster_runs import LOOPBACK, ClusterRun, listeners
from support.formula_run import formula_environment, processes
from support.real_run import RealRun, other_weights, weights_of

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(shutil.which("ssh") is None, reason="the ssh client is not here"),
    pytest.mark.skipif("SCANLOOM_SSH" not in os.environ, reason="SCANLOOM_SSH is not set"),
]


def make_run(folder: Path, host: str = "127.0.0.1") -> ClusterRun:
    prologue = [
        f"export {name}={shlex.quote(value)}"  # a session has an environment of its own
        for name, value in (
            ("FORMULA", str(folder / "notes")),
            ("FORMULA_SECONDS", "4"),
            ("PYTHONPATH", formula_environment(folder / "notes")["PYTHONPATH"]),
        )
    ]
    cluster = {
        "hosts": [host, host],
        "ssh_options": yaml.safe_load(os.environ["SCANLOOM_SSH"]),
        "interface": "lo",
        "job_script_prologue": prologue,
    }
    execution = {"in_flight": 1, "threads": 1, "cluster": cluster}
    text = yaml.safe_dump(execution, default_flow_style=True, width=10**6)
    return ClusterRun(folder, 6, 4.0, text)


def test_workers_over_ssh_share_the_scans_and_a_session_that_ends_is_opened_again(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    with run.going("--cluster", "ssh") as process:
        run.until(lambda: len(run.started) >= 2, "the first two scans")
        assert {address for address, _ in listeners(run.notes)} <= set(LOOPBACK)
        commands = processes(run.notes)
        assert "PRIVATE" not in " ".join(commands.values())
        worker = next(
            p for p, command in commands.items() if "engine.worker" in command and "-m" in command
        )
        os.kill(worker, signal.SIGKILL)
        run.check_end(process, 400.0)
    assert sum(run.started.values()) <= run.scans + 1
    assert not list(run.out.glob("private/runs/*/cluster*"))


def test_nothing_is_left_on_a_host_when_the_run_is_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with run.going("--cluster", "ssh") as process:
        run.until(lambda: run.started, "the first scan")
        process.kill()
        process.wait()
        run.until(lambda: not processes(run.notes), "the end of all processes", 30.0)


def test_a_host_that_does_not_answer(tmp_path: Path) -> None:
    run = make_run(tmp_path, "nobody@192.0.2.1")  # TEST-NET-1, RFC 5737
    quick = run.workflow.read_text().replace(
        "ssh_options: [", "ssh_options: [-o, ConnectTimeout=1, "
    )
    run.workflow.write_text(quick)
    with run.going("--cluster", "ssh") as process:
        assert process.wait(120) == 65
    assert "no worker started on any host" in run.output


def make_real_run(folder: Path) -> RealRun:
    """Return a run of two sessions; the second waits for a word, and has another store."""
    store, gate = folder / "theirs", folder / "gate"
    names = {"PYTHONPATH": formula_environment(folder / "notes")["PYTHONPATH"]}
    names |= {"FORMULA": str(folder / "notes"), "XDG_DATA_HOME": str(folder / "ours")}
    cluster = {
        "hosts": ["127.0.0.1", "127.0.0.1"],
        "ssh_options": yaml.safe_load(os.environ["SCANLOOM_SSH"]),
        "interface": "lo",
        "job_script_prologue": [
            *(f"export {name}={shlex.quote(value)}" for name, value in names.items()),
            f"if ! mkdir {gate} 2>/dev/null; then export XDG_DATA_HOME={store}",
            f"n=0; while [ ! -e {gate}/open -a $n -lt 600 ]; do sleep 0.2; n=$((n+1)); done; fi",
        ],
    }
    execution = {"in_flight": 1, "threads": 1, "device": "cpu", "cluster": cluster}
    text = yaml.safe_dump(execution, default_flow_style=True, width=10**6)
    return RealRun(folder, 60, text)


def test_a_late_session_with_other_weights_gives_no_result(tmp_path: Path) -> None:
    run = make_real_run(tmp_path)
    with run.real("--cluster", "ssh") as process:
        run.until(lambda: run.done, "the first result")
        (tmp_path / "gate" / "open").touch()
        assert process.wait(300) == 0, run.output
    assert run.hashes == {weights_of(run.ours)}
    assert run.done == run.status["done"] == run.scans
    assert set(run.status["sent_away"]) == {
        "1 of 1 workers have no or different files of the models"
    }


def test_weights_that_change_end_a_run_over_ssh(tmp_path: Path) -> None:
    run = make_real_run(tmp_path)
    before = weights_of(run.ours)
    with run.real("--cluster", "ssh") as process:
        run.until(lambda: run.done, "the first result")
        other_weights(run.ours)
        run.kill_engines()
        assert process.wait(240) == 65, run.output
    assert "MODEL_CHANGED" in run.output
    assert run.hashes == {before}
    assert not list(run.out.glob("failed/*"))
