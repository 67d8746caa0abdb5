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
    private : str
        Paths and descriptions of series that the finding is about, in one or several lines. They
        may name a patient: for the terminal and `OUT/private` only, and no part of the message.
    """

    def __init__(self, reason: Reason, detail: str, private: str = "") -> None:
        super().__init__(f"{reason.code}: {detail}. {reason.advice}.")
        self.reason = reason
        self.detail = detail
        self.private = private

    @property
    def code(self) -> str:
        """The code of the reason."""
        return self.reason.code

    def about(self, private: str) -> ScanError:
        """Return the same error with the path or series that it is about, unless it has one."""
        return self if self.private else ScanError(self.reason, self.detail, private)

    def __reduce__(self) -> tuple[type[ScanError], tuple[Reason, str, str]]:
        """Support pickling, so that a worker process can return the error."""
        return type(self), (self.reason, self.detail, self.private)
