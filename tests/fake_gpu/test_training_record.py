"""The table of a training costs no step a wait for the device."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from support.fake_cuda import stand_in

pytestmark = pytest.mark.skipif(not find_spec("ignite"), reason="needs the extra train")


# torch's own, when Ignite imports it
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_the_host_waits_for_the_loss_once_in_an_epoch(tmp_path: Path) -> None:
    # before the stand-in replaces functions of torch, which Ignite's imports compile
    from ignite.engine import Engine

    from scanloom.training.handlers import TrainingRecord, read_table

    losses = [3.0, 1.0, 0.5, 0.25, 8.0, 4.0, 2.0, 1.0]
    waits: list[int] = []

    with stand_in() as fake:
        on_device = torch.tensor(losses, device="cuda:0").unbind()
        fake.clear()

        def step(engine: Any, _: Any) -> dict[str, torch.Tensor]:
            waits.append(fake.ledger.waits)
            return {"loss": on_device[engine.state.iteration - 1]}

        trainer, evaluator = Engine(step), Engine(lambda *_: None)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        TrainingRecord(str(tmp_path), 2, evaluator, optimizer).attach(trainer)
        trainer.run([0, 1, 2, 3], max_epochs=2)
        waits.append(fake.ledger.waits)
    assert [row["loss"] for row in read_table(tmp_path / "training.csv")] == [4.75 / 4, 15.0 / 4]
    # the fourth step's loss is read before the fifth begins
    assert waits == [0, 0, 0, 0, 1, 1, 1, 1, 2]
