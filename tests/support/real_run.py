"""Runs by a real network, of models that change or are others elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scanloom.convert.store import find_model
from support.cluster_runs import ClusterRun
from support.commands import write_tiny_bundle
from support.formula_run import processes


class RealRun(ClusterRun):
    """A run by a real network, of a store that each process finds by XDG_DATA_HOME."""

    def __init__(
        self, folder: Path, scans: int, execution: str = "{in_flight: 1, device: cpu}"
    ) -> None:
        super().__init__(folder, scans, 0.0, execution)
        self.ours, self.theirs = folder / "ours", folder / "theirs"
        for store in (self.ours, self.theirs):
            (store / "scanloom").mkdir(parents=True)
            write_tiny_bundle(store / "scanloom" / "models", "changing")
        other_weights(self.theirs)
        workflow = self.workflow.read_text().split("\n")
        workflow[1] = "models: [changing]"
        self.workflow.write_text("\n".join(workflow))
        self.environment |= {"XDG_DATA_HOME": str(self.ours), "OMP_NUM_THREADS": "1"}

    @contextmanager
    def real(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        command = ["run", self.workflow, self.archive, "--out", self.out, *options]
        with self.log.open("ab") as log:
            run = subprocess.Popen(
                [sys.executable, "-m", "scanloom", *map(str, command)],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield run
        finally:
            run.kill()
            run.wait()

    def kill_engines(self) -> None:
        """Kill the processes that hold the models, as the system does for want of memory."""
        for child, command in processes(self.notes).items():
            if "scanloom.engine.worker.child_main" in command:
                os.kill(child, signal.SIGKILL)

    @property
    def hashes(self) -> set[str]:
        """The weights by which results say that they were made."""
        reported = [json.loads(p.read_text()) for p in self.out.glob("cases/*/case.json")]
        return {document["models"][0]["weights_sha256"] for document in reported}


def other_weights(store: Path) -> None:
    """Put other weights in the place of a model's."""
    import torch

    path = next(store.rglob("model.pt"))
    state = torch.load(path, weights_only=True)
    draft = path.with_name("draft")
    torch.save({name: -value for name, value in state.items()}, draft)
    draft.replace(path)


def weights_of(store: Path) -> str:
    return find_model(str(store / "scanloom" / "models" / "changing")).weights.published
