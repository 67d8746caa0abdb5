"""No line is lost, and each object is at its target, committed, whenever the sender is killed."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from scanloom.engine.listen.outbox import ASKED, REPORTS, WAITING, Outbox, outbox_folder
from support.receivers import listening
from support.targets import free_port, running_target, target_keys, write_case

pytest.importorskip("pynetdicom")
pytestmark = pytest.mark.slow

KILLS = 20
CASES = 3
"""That are added before each kill, of three objects each."""


def test_20_kills_of_the_sender(tmp_path: Path) -> None:
    out, port, chance = tmp_path / "site" / "out", free_port(), random.Random(61)
    folders, moments = list[Path](), Counter[str]()
    with running_target(
        tmp_path / "target", own_process=True, commit="own port", report_to=port
    ) as target:
        keys = target_keys(target.port, commitment="yes", report_within=4, give_up=3600)
        outbox = Outbox(outbox_folder(out))
        for kill in range(KILLS + 1):
            with listening(tmp_path / "site", port=port, targets=[keys]) as receiver:
                if kill == KILLS:  # the rest
                    deadline = time.monotonic() + 120
                    while outbox.open_lines() and time.monotonic() < deadline:
                        time.sleep(0.2)
                    assert receiver.stop() == 0
                    break
                for _ in range(CASES):
                    folders.append(write_case(out, f"case{len(folders)}", size=200_000))
                    outbox.add(folders[-1], "pacs")
                time.sleep(chance.uniform(0.0, 1.0))
                receiver.process.kill()
                receiver.process.wait(60)
            moments.update(line.state for line in outbox.open_lines())
            lines = [*outbox.open_lines(), *outbox.failed_lines(), *outbox.delivered_lines()]
            assert len({line.id for line in lines}) == len(lines) == 3 * len(folders)
        assert target.has(*folders)
        sent = target.told("store")

    delivered = list(outbox.delivered_lines())
    assert not outbox.failed_lines()
    assert len(delivered) == 3 * CASES * KILLS == len(sent)
    assert {line.proof for line in delivered} == {"committed"}
    for name in (WAITING, REPORTS):
        assert not [p for p in (outbox.folder / name).iterdir() if p.suffix == ".json"]
    outbox.tidy()
    assert not [p for p in (outbox.folder / ASKED).iterdir() if p.suffix == ".json"]
    print(f"{moments} at the kills, {sum(sent.values()) - len(sent)} objects sent again")
    assert len(moments) == 3, moments
