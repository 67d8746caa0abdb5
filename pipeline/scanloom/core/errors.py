"""The error type that users see."""

from __future__ import annotations

from scanloom.core.reasons import Reason


class ScanError(Exception):
    """A scan, model or archive can't be used, for a reason from the closed list.

    Parameters
    ----------
    reason : Reason
        Carries code, outcome and advice.
    detail : str
        The finding in scanloom's own text and numbers: foreign text may name a patient.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.code}: {detail}. {reason.advice}.")
        self.reason = reason
        self.detail = detail

    @property
    def code(self) -> str:
        """The code of the reason."""
        return self.reason.code

    def __reduce__(self) -> tuple[type[ScanError], tuple[Reason, str]]:
        """Support pickling, so that a worker process can return the error."""
        return type(self), (self.reason, self.detail)
