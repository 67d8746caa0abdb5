"""The one error that reaches a user."""

from __future__ import annotations

from scanloom.core.reasons import Reason


class ScanError(Exception):
    """A scan, a model or an archive can't be used, for a reason of the closed list.

    Parameters
    ----------
    reason : Reason
        Why; its code, outcome and advice travel with the error.
    detail : str
        What was seen. Our own words and numbers only: foreign text may name a patient.
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
        """Survive pickling, on the way back from a worker."""
        return type(self), (self.reason, self.detail)
