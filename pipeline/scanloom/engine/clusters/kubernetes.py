"""Workers as pods of a Kubernetes Job, through kubectl: with the user's own context and rights."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

from scanloom.core import Reason, ScanError
from scanloom.engine.workflow.schema import Execution
from scanloom.io.output.private import append_private

MAX_FAILED_PODS = 1000
"""Pods that may end; Kubernetes replaces each, with growing pauses."""

_COMMAND_TIMEOUT_S = 60.0
"""Time limit for a call of kubectl."""


class KubernetesJob:
    """Kubernetes Job of a run, with enough pods of `gpus` GPUs for its workers.

    The run itself must be in the cluster, in a pod with the same claims, so that pods reach it.

    Parameters
    ----------
    execution : Execution
        Number of workers, and the image, namespace, volumes, cores, memory and gpus of the cluster.
    contact : Path
        The contact file.
    logs : Path
        The run's private folder.
    """

    def __init__(self, execution: Execution, contact: Path, logs: Path) -> None:
        self._execution, self._contact, self._logs = execution, contact, logs
        self.name = "scanloom-" + re.sub("[^a-z0-9]+", "-", logs.name.lower())
        self._started = False

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the Job for `kubectl apply`.

        Raises
        ------
        ScanError
            CLUSTER if the image is missing, or a volume is not CLAIM:/PATH.
        """
        options = self._execution.cluster
        if options.image is None:
            raise ScanError(Reason.CLUSTER, "kubernetes needs execution.cluster.image")
        claims = [volume.partition(":") for volume in options.volumes]
        if not all(claim and path.startswith("/") for claim, _, path in claims):
            raise ScanError(Reason.CLUSTER, "a volume is CLAIM:/PATH")
        requested = {
            "cpu": str(options.cores) if options.cores else None,
            "memory": f"{math.ceil(options.memory / 2**20)}Mi" if options.memory else None,
            "nvidia.com/gpu": str(options.gpus) if options.gpus else None,
        }
        resources = {name: amount for name, amount in requested.items() if amount is not None}
        names = [f"claim-{n}" for n in range(len(claims))]
        container = {
            "name": "worker",
            "image": options.image,
            "command": [
                options.python or "python",
                *("-P", "-m", "scanloom.engine.clusters.remote_worker", str(self._contact)),
            ],
            "resources": {"requests": resources, "limits": resources},
            "volumeMounts": [
                {"name": name, "mountPath": path}
                for name, (_, _, path) in zip(names, claims, strict=True)
            ],
        }
        pod = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": [
                {"name": name, "persistentVolumeClaim": {"claimName": claim}}
                for name, (claim, _, _) in zip(names, claims, strict=True)
            ],
        }
        workers = 1 if self._execution.workers == "auto" else self._execution.workers
        pods = math.ceil(workers / max(1, options.gpus))
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": self.name, "namespace": options.namespace},
            "spec": {
                "parallelism": pods,
                # workers that end regularly are replaced too
                "completions": MAX_FAILED_PODS + pods,
                "backoffLimit": MAX_FAILED_PODS,
                "ttlSecondsAfterFinished": 3600,
                "template": {"spec": pod},
            },
        }

    def ensure_running(self, came: bool) -> None:
        """Apply the manifest once; Kubernetes itself replaces pods. See `WorkerLauncher`."""
        if not self._started:
            self._kubectl(["apply", "-f", "-"], json.dumps(self.manifest()))
            self._started = True

    def close(self) -> None:
        """Delete the Job with its pods."""
        if self._started:
            self._kubectl(["delete", "job", self.name, "--wait=false", "--ignore-not-found"])

    def _kubectl(self, arguments: list[str], text: str = "") -> None:
        command = ["kubectl", "--namespace", self._execution.cluster.namespace, *arguments]
        try:
            result = subprocess.run(  # noqa: S603
                command,
                input=text,
                capture_output=True,
                text=True,
                timeout=_COMMAND_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            detail = f"kubectl cannot be run ({type(exc).__name__})"
            raise ScanError(Reason.CLUSTER, detail) from exc
        if result.returncode:
            with append_private(self._logs / "kubernetes.log") as log:
                line = f"kubectl {arguments[0]} ended with {result.returncode}: {result.stderr}\n"
                log.write(line.encode())
            raise ScanError(Reason.CLUSTER, f"kubectl {arguments[0]} failed: see kubernetes.log")
