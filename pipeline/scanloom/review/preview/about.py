"""`About`: facts of a case that its pictures name, besides its scan and results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """Facts of a case that are not in its scan and results.

    Parameters
    ----------
    case_id : str
        Id of the case; empty if it has none.
    assumed_modality : str or None
        Modality that was assumed because the scan states none.
    limitations : tuple of str
        Known errors of the models, as sentences.
    """

    case_id: str = ""
    assumed_modality: str | None = None
    limitations: tuple[str, ...] = ()
