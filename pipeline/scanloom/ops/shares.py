"""Volumes of structures as shares of the volume of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from scanloom.core import Measurement, Reason, ScanError, did_you_mean
from scanloom.core.relations import Share

Name = tuple[str, str]
"""Model and label of a structure."""


def resolve_shares(shares: Sequence[Share], known: Sequence[Name]) -> dict[Name, tuple[Name, ...]]:
    """Return the structures whose volumes are added to the whole of each structure.

    Parameters
    ----------
    shares : sequence of Share
        Shares, whose structures are named by LABEL or MODEL/LABEL.
    known : sequence of (model, label)
        All structures of the results.

    Raises
    ------
    ScanError
        WORKFLOW if a name is unknown or ambiguous, or a structure has two wholes.
    """
    wholes: dict[Name, tuple[Name, ...]] = {}
    for share in shares:
        whole = tuple(_resolve(name, known) for name in share.of)
        members = [_resolve(name, known) for name in share.structures]
        for member in members or [name for name in known if name not in whole]:
            if member in wholes:
                detail = f"shares: {'/'.join(member)} is measured as a share twice"
                raise ScanError(Reason.WORKFLOW, detail)
            wholes[member] = whole
    return wholes


def add_shares(
    measurements: Sequence[Measurement], shares: Sequence[Share]
) -> tuple[Measurement, ...]:
    """Return measurements with the requested shares; None of an empty whole."""
    by_name = {(m.model, m.label): m for m in measurements}
    wholes = resolve_shares(shares, list(by_name))
    voxels = {name: m.voxels for name, m in by_name.items()}
    for name, whole in wholes.items():
        share, text = share_of(name, whole, voxels), describe(whole)
        by_name[name] = replace(by_name[name], share=share, share_of=text)
    return tuple(by_name.values())


def share_of(name: Name, whole: Sequence[Name], voxels: Mapping[Name, int]) -> float | None:
    """Return the share of a structure in a whole, from numbers of voxels on one grid."""
    total = sum(voxels[member] for member in whole)
    return voxels[name] / total if total else None


def describe(whole: Sequence[Name]) -> str:
    """Return a whole as text: "model/brain + model/csf"."""
    return " + ".join("/".join(name) for name in whole)


def _resolve(name: str, known: Sequence[Name]) -> Name:
    model, separator, label = name.rpartition("/")
    matches = [each for each in known if each[1] == label and (not separator or each[0] == model)]
    if not matches:
        labels = ["/".join(each) if separator else each[1] for each in known]
        raise ScanError(Reason.WORKFLOW, f"shares: {did_you_mean(name, dict.fromkeys(labels))}")
    if len(matches) > 1:
        expected = " or ".join("/".join(each) for each in matches)
        raise ScanError(Reason.WORKFLOW, f"shares: several results have {name}: {expected}")
    return matches[0]
