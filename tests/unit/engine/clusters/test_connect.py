"""Requests to clusters (jobs, sessions, GPUs) and answers of workers, without a cluster."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from scanloom.core import ScanError
from scanloom.engine.clusters.connect import check_cluster, open_cluster
from scanloom.engine.clusters.contact import Answer, answer, describe_mismatch, hold_handshake
from scanloom.engine.clusters.kinds import KINDS, ClusterKind, cluster_names, find_kind
from scanloom.engine.clusters.launchers import SlurmJobs, SshHosts
from scanloom.engine.machine import devices
from scanloom.engine.worker.messages import CaseFile
from scanloom.engine.workflow.schema import Cluster, Execution, parse_workflow
from support import engine_models as em

NO_CLUSTER = (
    "slrum",
    "slurm:node1",
    "kubernetes",
    "sshd:node1",
    "",
)
"""Names that are no kind of cluster, no address and no file."""


@pytest.mark.parametrize("name", NO_CLUSTER)
def test_an_unknown_kind_of_cluster_is_refused(name: str, tmp_path: Path) -> None:
    assert find_kind(name) is None
    with pytest.raises(ScanError, match="neither local, slurm, ssh:HOSTS, nor an"):
        check_cluster(name, Execution())
    with (
        pytest.raises(ScanError, match="neither local"),
        open_cluster(name, Execution(), tmp_path, 1),
    ):
        pass


def test_a_queue_has_no_time_limit_without_a_worker() -> None:
    limits = {name: kind.worker_timeout_s for name, kind in KINDS.items()}
    assert limits == {"slurm": float("inf"), "ssh": 600.0}


def test_a_new_kind_takes_part_by_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def launcher(execution: Execution, hosts: str, private: Path) -> Any:
        requests.append((execution.in_flight, hosts, private))

    monkeypatch.setitem(KINDS, "grid", ClusterKind(launcher, takes_hosts=True))
    check_cluster("grid:a,b", Execution(in_flight=2))
    assert requests == [(2, "a,b", Path())]
    assert "grid:HOSTS" in cluster_names()


GOOD = Answer("token", "1.0", (3, 11), ("hash",), True, True, True)


class FakeNvml:
    """Two plain GPUs, one cut into two slices with an empty place, one cut and without a slice."""

    def __init__(self) -> None:
        self.slices: dict[str, list[str | None]] = {
            "GPU-b": ["MIG-b0", None, "MIG-b1"],
            "GPU-d": [],
        }
        self.names = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]

    def into(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def slice_of(handle: str, n: int) -> str:
            device = self.slices[handle][n]
            if device is None:
                raise pynvml.NVMLError_NotFound
            return device

        def mig_mode(handle: str) -> tuple[int, int]:
            if handle == "GPU-c":
                raise pynvml.NVMLError_NotSupported
            return int(handle in self.slices), 0

        fakes = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(self.names),
            "nvmlDeviceGetHandleByIndex": lambda n: self.names[n],
            "nvmlDeviceGetMigMode": mig_mode,
            "nvmlDeviceGetMaxMigDeviceCount": lambda handle: len(self.slices[handle]),
            "nvmlDeviceGetMigDeviceHandleByIndex": slice_of,
            "nvmlDeviceGetUUID": lambda handle: handle,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(pynvml, name, fake)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    fake.into(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.mark.usefixtures("nvml")
def test_each_gpu_and_each_slice_gets_a_worker() -> None:
    names = devices.local_devices(Execution())

    assert names == ["GPU-a", "MIG-b0", "MIG-b1", "GPU-c"]
    seen = [devices.worker_environment(d, names)["CUDA_VISIBLE_DEVICES"] for d in names]
    assert seen == names


@pytest.mark.usefixtures("nvml")
def test_workers_beyond_the_gpus_share_them_and_a_cpu_worker_sees_what_there_is() -> None:
    five = devices.local_devices(Execution(workers=5))
    assert five == ["GPU-a", "MIG-b0", "MIG-b1", "GPU-c", "GPU-a"]
    assert devices.local_devices(Execution(device="cpu", workers=2)) == ["", ""]
    assert devices.local_devices(Execution(device="cuda:1")) == [
        ""
    ]  # numbered as CUDA numbers them
    assert "CUDA_VISIBLE_DEVICES" not in devices.worker_environment("", [""])


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        ("1, 3", ["1", "3"]),
        ("MIG-x", ["MIG-x"]),
        ("", []),
        ("-1", []),
        ("0,-1,2", ["0"]),
        ("NoDevFiles", []),
    ],
)
def test_a_list_of_the_user_or_of_slurm_is_kept(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, variable: str, seen: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert devices.visible_gpus() == seen


def test_without_a_driver_there_is_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert devices.local_devices(Execution()) == [""]


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return AMD's folder of a processor and two GPUs, on a machine without NVIDIA's driver."""

    def no_driver() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    for number, gpu_id in enumerate((0, 4711, 815)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
    monkeypatch.setattr(devices, "KFD_NODES", tmp_path)
    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.usefixtures("amd")
def test_each_amd_gpu_gets_a_worker_without_nvml() -> None:
    names = devices.local_devices(Execution())

    assert len(names) == 2
    environments = [devices.worker_environment(name, names) for name in names]
    assert [e["HIP_VISIBLE_DEVICES"] for e in environments] == ["0", "1"]
    assert not any("CUDA_VISIBLE_DEVICES" in e for e in environments)


@pytest.mark.usefixtures("amd")
@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("HIP_VISIBLE_DEVICES", "1", ["hip:1"]),
        ("HIP_VISIBLE_DEVICES", "", []),
        ("ROCR_VISIBLE_DEVICES", "1", ["hip:0"]),
        ("CUDA_VISIBLE_DEVICES", "1", ["1"]),  # HIP reads it too
    ],
)
def test_a_users_list_of_amd_gpus_is_kept(
    variable: str, value: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert devices.visible_gpus() == expected


def test_an_amd_gpu_that_the_container_may_not_use_is_not_counted(
    amd: Path,
) -> None:
    (amd / "1" / "gpu_id").unlink()
    (amd / "1" / "gpu_id").mkdir()  # as for root, a file that cannot be read

    assert devices.visible_gpus() == ["hip:0"]


def test_workers_share_the_cores_and_what_the_user_said_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")

    shared = devices.worker_environment("", [""] * 3)

    assert (shared["OMP_NUM_THREADS"], shared["MKL_NUM_THREADS"]) == ("2", "7")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (GOOD, None),
        (RuntimeError("foreign words"), "1 of 2 workers have no scanloom 1.0"),
        (replace(GOOD, version="0.9"), "workers run scanloom 0.9, this is 1.0"),
        (replace(GOOD, python=(3, 9)), "workers run Python 3.9, this is 3.11"),
        (replace(GOOD, token=None), "1 of 2 workers don't see the output folder"),
        (replace(GOOD, token="other"), "1 of 2 workers don't see the output folder"),
        (replace(GOOD, models=(None,)), "1 of 2 workers have no or different files of the models"),
        (replace(GOOD, sees_scans=False), "1 of 2 workers don't see the scans"),
        (replace(GOOD, reads_scans=False), "1 of 2 workers can't read the scans"),
        (replace(GOOD, writes=False), "1 of 2 workers can't write in the output folder"),
    ],
)
def test_a_mismatched_worker_is_described_without_foreign_text(
    answer: object, message: str | None
) -> None:
    assert describe_mismatch({"a": GOOD, "b": answer}, GOOD) == message


def test_a_worker_may_lack_what_this_process_lacks() -> None:
    unable = replace(GOOD, sees_scans=False, reads_scans=False, writes=False)

    assert describe_mismatch({"a": GOOD, "b": unable}, unable) is None


def test_a_worker_tries_to_read_and_to_write(tmp_path: Path) -> None:
    (tmp_path / "out" / "cases").mkdir(parents=True)
    case = em.make_case(tmp_path, "scan")
    case_file = CaseFile(tmp_path / "case_file")
    case_file.append(case)
    scan = case.series.files[0]
    with hold_handshake(tmp_path / "out", case_file=case_file.path) as handshake:
        before = answer(handshake.question)
        scan.rename(tmp_path / "away")
        scan.mkdir()  # it is there, and nobody can read it, not even root
        after = answer(handshake.question)
        blocked = replace(handshake.question, token=str(case_file.path / "handshake"))

        assert (before.sees_scans, before.reads_scans, before.writes) == (True, True, True)
        assert (after.sees_scans, after.reads_scans, after.writes) == (True, False, True)
        assert not answer(blocked).writes
        assert not list((tmp_path / "out" / "cases").iterdir())
        assert len(list((tmp_path / "out" / ".work").iterdir())) == 1


def test_a_worker_of_a_service_has_to_see_its_spool(tmp_path: Path) -> None:
    """A service has no case yet, and its folder may have a namesake on the machine of a worker."""
    spool, out, case_file = tmp_path / "spool", tmp_path / "out", CaseFile(tmp_path / "case_file")
    out.mkdir()
    with (
        hold_handshake(out, case_file=case_file.path, spool=spool) as handshake,
        hold_handshake(out, case_file=case_file.path, spool=spool) as other,
    ):
        here = [answer(each.question) for each in (handshake, other)]
        (token,) = spool.iterdir()
        assert token.stat().st_mode & 0o777 == 0o600
        token.write_text("of another spool")
        namesake = answer(handshake.question)
        token.unlink()
        missing = answer(handshake.question)

    assert describe_mismatch({"a": here[0]}, handshake.expected) is None
    assert describe_mismatch({"a": here[1]}, other.expected) is None
    for each in (namesake, missing):
        told = describe_mismatch({"a": here[0], "b": each}, handshake.expected)
        assert told == "1 of 2 workers don't see the scans"


WORKFLOW = """
name: site
models: [ct_tissue]
execution:
  workers: 6
  cluster:
    queue: gpu
    account: radiology
    walltime: 1-00:30:00
    cores: 8
    memory: 32 GiB
    gpus: 4
    job_extra_directives: ["--constraint=a100", "#SBATCH --mail-type=FAIL --nice=10"]
    job_script_prologue: ["module load python", "source '/opt/my env/bin/activate'"]
    python: /opt/my env/bin/python
"""


def test_a_job_is_ordered_as_the_site_wants_it() -> None:
    jobs = SlurmJobs(parse_workflow(WORKFLOW).execution, Path("contact"), Path("logs"))

    assert jobs.jobs == 2  # of four workers each
    assert jobs.arguments == (
        "--ntasks=1",
        "--partition=gpu",
        "--account=radiology",
        "--time=1470",
        "--mem=32768M",
        "--cpus-per-task=8",
        "--gres=gpu:4",
        "--constraint=a100",
        "--mail-type=FAIL",
        "--nice=10",
    )


@pytest.mark.parametrize(
    ("walltime", "seconds"),
    [("24:00:00", 86400), ("'01:30:00'", 5400), ("2-00:00:00", 172800), ("36 h", 129600)],
)
def test_a_walltime_as_slurm_or_people_write_it(walltime: str, seconds: float) -> None:
    text = WORKFLOW.replace("1-00:30:00", walltime)
    assert parse_workflow(text).execution.cluster.walltime == seconds


def test_the_script_of_a_job_is_shell_whatever_stands_in_a_path(tmp_path: Path) -> None:
    python = tmp_path / "an 'odd' $(name)"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$MARK" "$@"\n')
    python.chmod(0o755)
    options = Cluster(python=str(python), job_script_prologue=("export MARK='a b'",))
    contact = tmp_path / "a b; c.json"

    script = SlurmJobs(Execution(cluster=options), contact, tmp_path).script()
    output = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout

    assert output.split("\n")[:-1] == [
        "a b",
        "-P",
        "-m",
        "scanloom.engine.clusters.remote_worker",
        str(contact),
    ]


def test_an_ssh_command_has_no_secret_and_is_not_interactive(tmp_path: Path) -> None:
    options = Cluster(ssh_options=("-p", "2222"))
    contact = tmp_path / "contact.json"

    command = SshHosts(["node1"], options, contact, tmp_path).command("node1")

    assert command[:3] == ["ssh", "-p", "2222"]
    assert "BatchMode=yes" in command
    assert command[-3:-1] == ["--", "node1"]
    arguments = [
        sys.executable,
        "-P",
        "-m",
        "scanloom.engine.clusters.remote_worker",
        str(contact),
        "--tied",
    ]
    assert shlex.split(command[-1]) == ["sh", "-c", f"exec {shlex.join(arguments)}"]


class Cluster22:
    """A fake SLURM that records its requests; its jobs are in the states that the test sets."""

    def __init__(self, folder: Path, alive: int, code: int = 0) -> None:
        self.alive, self.code, self.asked = alive, code, []
        self.jobs = SlurmJobs(Execution(workers=3), folder / "c.json", folder)
        self.jobs._call = self.ask

    def ask(self, command: list[str], text: str = "") -> SimpleNamespace:
        self.asked.append(command[0])
        return SimpleNamespace(returncode=self.code, stdout="RUNNING\n" * self.alive, stderr="")


def test_jobs_that_ended_are_replaced_not_too_fast_and_not_for_ever(tmp_path: Path) -> None:
    slurm = Cluster22(tmp_path, 0)
    now = [1000.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "scanloom.engine.clusters.launchers.time", SimpleNamespace(monotonic=lambda: now[0])
        )
        slurm.jobs.ensure_running(joined=False)
        assert slurm.asked.count("sbatch") == 3
        slurm.jobs.ensure_running(joined=False)
        assert slurm.asked.count("sbatch") == 3  # a moment later
        slurm.alive, now[0] = 2, now[0] + 31
        slurm.jobs.ensure_running(joined=True)
        assert slurm.asked.count("sbatch") == 4
        slurm.code, slurm.alive, now[0] = 1, 0, now[0] + 1000
        slurm.jobs.ensure_running(joined=True)
        assert slurm.asked.count("sbatch") == 4  # it does not answer: nothing is known
        slurm.code, now[0] = 0, now[0] + 200
        slurm.jobs.ensure_running(joined=True)
        now[0] += 1000
        with pytest.raises(ScanError, match="jobs end before a worker joins"):
            slurm.jobs.ensure_running(joined=False)


def test_a_refused_job_is_submitted_again_after_the_pause_and_cancelled_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an account may have no more jobs; without an answer, a job may be queued."""
    slurm, now = Cluster22(tmp_path, 0, code=1), [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("scanloom.engine.clusters.launchers.time", clock)
    with pytest.raises(ScanError, match="sbatch refused"):
        slurm.jobs.ensure_running(joined=True)
    slurm.code = 0
    for _ in range(10):
        now[0] += 3
        slurm.jobs.ensure_running(joined=True)
    slurm.jobs.close()

    assert slurm.asked == ["sbatch", "squeue", *["sbatch"] * 3, "scancel"]


def test_a_controller_is_asked_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves all users of a cluster; a job that is lost is noticed within minutes."""
    slurm, now = Cluster22(tmp_path, 3), [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("scanloom.engine.clusters.launchers.time", clock)
    asked = []
    for _ in range(1200):  # an hour
        before = len(slurm.asked)
        slurm.jobs.ensure_running(joined=True)
        asked += [now[0] - 1000.0] * ("squeue" in slurm.asked[before:])
        now[0] += 3.0

    assert asked[:4] == [30.0, 90.0, 210.0, 390.0]
    assert len(asked) == 3 + len(range(390, 3600, 180))
    slurm.alive, count = 2, slurm.asked.count("sbatch")
    now[0] += 180.0
    slurm.jobs.ensure_running(joined=True)
    assert slurm.asked.count("sbatch") == count + 1


SBATCH = """#!/bin/sh
# as SLURM: the log is opened with the umask of sbatch, and the job runs with it
log=$(printf '%s\\n' "$@" | sed -n 's/^--output=//p' | sed 's/%j/7/')
sh > "$log"
"""


@pytest.mark.parametrize("mask", [0o002, 0o022])
def test_logs_of_clusters_are_for_their_owner_and_results_as_before(
    tmp_path: Path, mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts' own messages, paths and lines of the user's profile are in them."""
    programs, logs = tmp_path / "bin", tmp_path / "logs"
    programs.mkdir()
    logs.mkdir()
    worker = f'#!/bin/sh\necho started\n: > "{tmp_path}/result"\n'
    failing = "#!/bin/sh\necho /archive/DOE_JANE >&2\nexit 1\n"
    texts = {"sbatch": SBATCH, "python": worker, "ssh": failing}
    for name, text in {**texts, "squeue": failing}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    before = os.umask(mask)
    try:
        options = Cluster(python=str(programs / "python"))
        jobs = SlurmJobs(Execution(cluster=options), tmp_path / "c.json", logs)
        jobs.ensure_running(joined=False)
        jobs._alive()
        hosts = SshHosts(["node"], options, tmp_path / "c.json", logs)
        hosts.ensure_running(joined=False)
        hosts.close()
    finally:
        os.umask(before)

    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in logs.iterdir()}
    names = ("slurm-7.log", "slurm.log", "ssh-0.log")
    assert modes == dict.fromkeys(names, 0o600)
    assert (logs / "slurm-7.log").read_text() == "started\n"
    assert b"DOE_JANE" in (logs / "ssh-0.log").read_bytes()
    assert stat.S_IMODE((tmp_path / "result").stat().st_mode) == 0o666 & ~mask


def test_the_key_of_a_run_is_for_its_owner_and_goes_with_it(tmp_path: Path) -> None:
    from distributed.security import Security

    from scanloom.engine.clusters.contact import Contact, contact_file

    execution = Execution(cluster=Cluster(walltime="1 h", gpus=2))
    with contact_file("tls://here:1", execution, Security.temporary(), tmp_path) as path:
        reported = Contact.read(path)
        modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
        assert modes == {0o600}
        assert "PRIVATE KEY" in Path(reported.key).read_text()
        assert "PRIVATE KEY" not in Path(reported.certificate).read_text() + path.read_text()
        assert (reported.workers, reported.lifetime) == (2, 3480.0)
    assert not list(tmp_path.iterdir())
