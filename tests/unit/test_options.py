"""Options objects: closed lists of words, and the parameters of the command line."""

from __future__ import annotations

from typing import Any

import pytest

from scanloom.core import ComputeOptions, Outputs, ReadOptions
from scanloom.options import (
    Radiomics,
    SegmentOptions,
    check_values,
    segment_options,
    take,
    walk_options,
)


@pytest.mark.parametrize(
    "options",
    [
        ReadOptions(gaps="fill"),
        ReadOptions(modality="ct"),
        ComputeOptions(precision="double"),
    ],
)
def test_a_word_that_is_not_listed_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        check_values(options)
    check_values(type(options)())


def test_an_unknown_optional_writer_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"also must be of .*'image'.*, got 'picture'"):
        Outputs(also=("masks", "picture"))


def test_settings_stand_in_workflows_alone() -> None:
    assert "radiomics" not in {option.name for _, option, _ in walk_options()}
    with pytest.raises(ValueError, match=r"families must be of .*'glcm'.*, got 'glmc'"):
        Radiomics(families=("glmc",))
    with pytest.raises(ValueError, match="at least one"):
        Radiomics(families=())
    with pytest.raises(ValueError, match="bins must be at least 2"):
        check_values(Outputs(also=("radiomics",), radiomics=Radiomics(bins=1)))


def test_flat_values_find_their_objects() -> None:
    options = segment_options(
        models=("m",), out="out", gaps="interpolate", precision="half", phase=2
    )
    read, compute = ReadOptions(gaps="interpolate"), ComputeOptions("half")
    assert options == SegmentOptions(("m",), "out", phase=2, read=read, compute=compute)
    outputs = Outputs(also=("masks",))
    assert segment_options(models=(), out="out", outputs=outputs).outputs == outputs
    with pytest.raises(TypeError, match="gap"):
        segment_options(models=(), out="out", gap="interpolate")
    assert take(ReadOptions, {"nan": "padding", "precision": "half"}) == ReadOptions(nan="padding")
