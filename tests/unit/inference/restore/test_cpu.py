"""Compiled kernels label as plain torch does, but for exact ties, and give way where they can't."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from scanloom.cards.card import Argmax, Decision, NetworkGrid, Threshold
from scanloom.inference.geometry import plan_grid
from scanloom.inference.restore import cpu
from scanloom.inference.restore.decisions import map_count
from scanloom.inference.restore.restorers import Label, ScoreRestorer, choose_backend, restore_torch
from scanloom.inference.sliding_window import ScorePlanes
from support import model_cards, restore_cases
from support.restore_cases import Case

CPU = torch.device("cpu")


def labelled(case: Case, label: Label) -> list[NDArray[Any]]:
    out = [case.out(case.shape) for _ in range(map_count(case.decision, case.scores.shape[1]))]
    for labels in out:
        labels[:] = restore_cases.POISON if isinstance(case.decision, Argmax) else 0
    label(case.scores, case.places, case.decision, out, rounded=case.rounded)
    return out


@pytest.mark.parametrize("name", restore_cases.cases())
@pytest.mark.parametrize("label", [cpu.label, restore_torch])
def test_labels_are_those_of_scores_brought_back(name: str, label: Label) -> None:
    case = restore_cases.cases()[name]

    assert restore_cases.count_wrong(case, labelled(case, label)) == 0


sizes = st.integers(1, 13)
counts = st.integers(1, 17)


@st.composite
def made_up(draw: st.DrawFn) -> Case:
    """Scores of any shape, type and order in memory; coordinates that rise, fall and lean."""
    planes, rows, columns, classes = (draw(sizes) for _ in range(4))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    scores = restore_cases.smooth(planes, classes, rows, columns, dtype)
    order = draw(st.permutations([0, 1, 2, 3]))
    back = [order.index(n) for n in range(4)]
    scores = scores.permute(order).contiguous().permute(back)
    shape = tuple(draw(counts) for _ in range(3))
    at = []
    for size, count in zip((planes, rows, columns), shape, strict=True):
        ends = draw(st.tuples(st.floats(-3, size + 2), st.floats(-3, size + 2)))
        at.append(np.linspace(*ends, count))
    if draw(st.booleans()):
        lean = draw(st.floats(-2, 2)) * np.arange(shape[0])[:, None]
        at[1], at[2] = at[1] + lean, at[2] - lean / 3
    decision: Decision = draw(st.sampled_from([Argmax(), Threshold(0.5), Threshold(-0.25)]))
    kind = np.uint16 if dtype is torch.float32 and draw(st.booleans()) else np.uint8
    turn = draw(st.sampled_from([1, -1]))
    return Case(
        scores,
        (at[0], at[1], at[2]),
        decision,
        lambda shape: np.zeros(shape[::-1], kind).T[::turn, :, ::-turn],
    )


@settings(max_examples=100)
@given(made_up())
def test_labels_are_those_of_plain_torch_but_for_ties(case: Case) -> None:
    kernels, torches = labelled(case, cpu.label), labelled(case, restore_torch)

    truth = restore_cases.brought_back(case)
    rounding = 1e-5 * max(1.0, float(np.abs(truth).max()))
    if isinstance(case.decision, Threshold):
        tied = np.abs(truth - case.decision.value) < rounding
        for number, (kernel_mask, torch_mask) in enumerate(zip(kernels, torches, strict=True)):
            assert ((kernel_mask == torch_mask) | tied[:, number]).all()
        return
    ranked = np.sort(truth, axis=1)
    tied = ranked[:, -1] - ranked[:, -2:][:, 0] < rounding
    assert ((kernels[0] == torches[0]) | tied).all()


@pytest.mark.parametrize("decision", [Argmax(), Threshold(0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_do_the_work_on_a_cpu(
    dtype: torch.dtype, decision: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are chosen, and they are called: counted at the kernel itself."""
    backend = choose_backend(decision, 3, CPU, dtype)
    assert backend.label is cpu.label
    assert "Numba" in backend.why
    called: list[int] = []
    kernels = cpu._kernels()
    label_rows = kernels.label_rows

    def counted(*arguments: Any) -> None:
        called.append(1)
        label_rows(*arguments)

    monkeypatch.setattr(kernels, "label_rows", counted)
    plan = plan_grid(model_cards.grid((9, 8, 7)), NetworkGrid("LPS", (2.0, 2.0, 2.0)))
    shape = plan.network.shape
    restorer = ScoreRestorer(plan, decision, 3)

    scores = restore_cases.smooth(shape[2], 3, shape[0], shape[1], dtype)
    restorer.add(ScorePlanes(0, scores))

    assert restorer.backend == backend
    assert called
    assert restorer.labels[0].any()


def test_more_threads_give_the_same_labels() -> None:
    case = restore_cases.cases()["float32"]
    before = torch.get_num_threads()
    (single,) = labelled(case, cpu.label)
    try:
        torch.set_num_threads(5)
        (five,) = labelled(case, cpu.label)
    finally:
        torch.set_num_threads(before)

    np.testing.assert_array_equal(single, five)


def test_scores_that_are_no_numbers_give_labels_all_the_same() -> None:
    """A network that overflowed: some class is named, none beyond the last."""
    case = restore_cases.cases()["float32"]
    for value in (float("nan"), float("inf"), -float("inf")):
        scores = case.scores.clone()
        scores[1:4, :, 2:8] = value
        (labels,) = labelled(Case(scores, case.places), cpu.label)
        assert labels.max() < scores.shape[1]


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("classes", [4, 16, 17, 33])
def test_of_equal_scores_the_first_wins_in_noise(classes: int, rounded: bool) -> None:
    """Each class is there twice, as is each number of classes that is compared at once."""
    noise = torch.randn(6, classes, 7, 9, generator=torch.Generator().manual_seed(classes))
    noise = (noise + 8).to(torch.float16) if rounded else noise
    at = restore_cases.spread(6, 5), restore_cases.spread(7, 11), restore_cases.spread(9, 13)
    case = Case(torch.cat([noise, noise], dim=1), at, rounded=rounded)

    (labels,) = labelled(case, cpu.label)

    assert labels.max() < classes
    assert restore_cases.count_wrong(case, [labels]) == 0


PROBE = """
import warnings
warnings.simplefilter("error")
import numba, torch
from scanloom.cards.card import Argmax
from scanloom.inference.restore.restorers import choose_backend
before = numba.config.CACHE_DIR
backend = choose_backend(Argmax(), 3, torch.device("cpu"))
assert numba.config.CACHE_DIR == before
print(backend.label.__name__, "|", backend.why)
"""


def probed(code: str = PROBE, **environment: str) -> str:
    """Return which way a process of its own chooses."""
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow  # it compiles
def test_compiled_code_is_kept_in_the_users_cache_folder(tmp_path: Path) -> None:
    assert probed(XDG_CACHE_HOME=str(tmp_path)).startswith("label |")

    kept = tmp_path / "scanloom" / "numba"
    assert list(kept.rglob("*label_rows*.nbc"))
    assert not kept.stat().st_mode & 0o077


@pytest.mark.thorough
def test_plain_torch_takes_over_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")

    backend = probed(XDG_CACHE_HOME=str(blocked))

    assert (
        backend
        == "restore_torch | plain torch: compiled code can't be kept in the user's cache folder"
    )


@pytest.mark.thorough
def test_plain_torch_takes_over_where_numba_is_missing() -> None:
    hidden = "import sys\nsys.modules['numba'] = None\n" + PROBE.replace(
        "import numba, torch", "import torch"
    ).replace("numba.config.CACHE_DIR", "0")

    assert probed(hidden).startswith("restore_torch | plain torch: Numba is not installed")


@pytest.mark.parametrize("fault", ["open to all", "a link", "below a folder open to all"])
def test_code_is_not_loaded_from_where_others_can_add_some(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "a" / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    usual = base / "scanloom" / "numba"
    assert cpu.cache_folder() == usual
    folders = (tmp_path / "a", base, base / "scanloom", usual)
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700] * 4
    if fault == "a link":
        usual.rmdir()
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs").chmod(0o777)
        usual.symlink_to(tmp_path / "theirs")
    else:
        (usual if fault == "open to all" else base).chmod(0o777)

    folder = cpu.cache_folder()

    assert not folder.is_relative_to(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cpu.cache_folder() == folder
