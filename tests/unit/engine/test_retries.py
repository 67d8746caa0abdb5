"""The table of retries: its page says the same, and each reason has a policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from scanloom.core import Reason
from scanloom.engine import retries
from scanloom.engine.clusters import launchers
from scanloom.engine.retries import RetryPolicy, policy_of

PAGE = Path(__file__).parents[3] / "docs" / "retries.md"


def table(heading: str) -> dict[str, list[str]]:
    """Return the cells of the page's table that begins with a heading, by first cell."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {heading} |")) + 2
    rows: dict[str, list[str]] = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows.setdefault(first, []).extend(cells)
    return rows


def cells(policy: RetryPolicy) -> list[str]:
    pauses = ", ".join(f"{pause:.0f}" for pause in policy.pauses_s)
    yes_no = {True: "yes", False: "no"}
    return [
        f"{pauses} s" if pauses else "none",
        yes_no[policy.alone_in_new_process],
        policy.other_worker,
        yes_no[policy.in_later_run],
    ]


def is_retried_in_a_run(policy: RetryPolicy) -> bool:
    return bool(policy.pauses_s or policy.alone_in_new_process or policy.other_worker != "none")


def test_the_page_lists_each_reason_that_a_run_retries() -> None:
    policies = {reason: policy_of(reason) for reason in Reason}
    assert table("reason") == {
        f"`{reason.code}`": cells(policy)
        for reason, policy in policies.items()
        if is_retried_in_a_run(policy)
    }


@pytest.mark.parametrize(
    ("layer", "limit"),
    [
        ("1. worker", f"{retries.MAX_CHILD_STARTS} in a row"),
        ("1. worker", "{:.0f}, {:.0f} and {:.0f} s".format(*retries.STORAGE_PAUSES_S)),
        ("2. cluster", f"{retries.MAX_OUTDONE_CASES} cases"),
        ("3. run", f"{retries.MAX_WORKER_LOSSES} losses, then `{Reason.WORKER_LOST.code}`"),
        (
            "3. run, `slurm`",
            f"{launchers.MAX_FUTILE_JOBS} more than requested until a worker joins",
        ),
        ("3. run, `ssh`", f"{launchers.MAX_FUTILE_ROUNDS} rounds until a worker joins"),
    ],
)
def test_the_page_gives_the_limits(layer: str, limit: str) -> None:
    assert limit in table("layer")[layer]


def test_the_page_gives_the_pauses_of_jobs() -> None:
    layers = table("layer")
    of_slurm = f"after {launchers.FIRST_PAUSE_S:.0f} s to {launchers.MAX_PAUSE_S:.0f} s"
    of_ssh = ", ".join(f"{pause:.0f}" for pause in launchers.PAUSES_S[1:])
    assert any(of_slurm in cell for cell in layers["3. run, `slurm`"])
    assert any(f"after {of_ssh} s" in cell for cell in layers["3. run, `ssh`"])


@pytest.mark.parametrize("reason", Reason)
def test_a_later_run_retries_what_the_reason_says(reason: Reason) -> None:
    policy = policy_of(reason)
    assert policy.in_later_run == reason.retry
    assert policy.new_child == (reason.retry and reason is not Reason.MODEL_CHANGED)
    assert reason.retry or not is_retried_in_a_run(policy)


def test_a_success_is_not_retried() -> None:
    assert policy_of(None) == RetryPolicy()


@pytest.mark.parametrize(
    ("reason", "one_machine", "several"),
    [
        (Reason.DEVICE_UNAVAILABLE, True, True),
        (Reason.ENVIRONMENT, False, True),
        (Reason.CRASHED, False, False),
        (None, False, False),
    ],
)
def test_another_worker_may_do_better(
    reason: Reason | None, one_machine: bool, several: bool
) -> None:
    policy = policy_of(reason)
    assert policy.on_other_worker(same_machine=True) is one_machine
    assert policy.on_other_worker(same_machine=False) is several
