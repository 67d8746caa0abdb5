from __future__ import annotations

import copy
import pickle
import re
from typing import get_args

import pytest

from scanloom.core import OUTCOMES, Flag, Reason, ScanError
from scanloom.core.reasons import Subject


@pytest.mark.parametrize("reason", Reason, ids=lambda r: r.code)
def test_every_reason_says_what_to_do(reason):
    """A code for machines, an outcome, and one sentence of advice that ends without a stop."""
    assert re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", reason.code)
    assert reason.outcome in OUTCOMES
    assert isinstance(reason.retry, bool)
    assert reason.advice[0].isupper()
    assert len(reason.advice) > 15
    assert not reason.advice.endswith(".")


def test_reasons_of_results_and_runs():
    """All other reasons are those of a single case."""
    assert {reason.subject for reason in Reason} == set(get_args(Subject))
    codes = {
        subject: {reason.code for reason in Reason if reason.subject == subject}
        for subject in ("result", "run")
    }
    assert codes == {
        "result": {"STALE", "RESULT_DAMAGED", "NEWER_VERSION", "OLDER_VERSION"},
        "run": {"DISK_FULL", "KEY_MISMATCH", "MODEL_CHANGED"},
    }


@pytest.mark.parametrize("flag", Flag, ids=lambda f: f.code)
def test_every_flag_says_what_was_done(flag):
    """A code for machines and a sentence for people."""
    assert re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", flag.code)
    assert flag.text[0].isalpha()
    assert len(flag.text) > 15
    assert not flag.text.endswith(".")


@pytest.mark.parametrize("kind", [Reason, Flag])
def test_members_are_distinct(kind):
    """No member is another's alias, and no two say the same."""
    assert len(kind) == len(kind.__members__)
    assert len({member.value for member in kind}) == len(kind)
    texts = [m.advice if isinstance(m, Reason) else m.text for m in kind]
    codes = [m.code for m in kind]
    assert len(set(codes)) == len(codes)
    assert kind is Reason or len(set(texts)) == len(texts)


@pytest.mark.parametrize("kind", [Reason, Flag])
def test_the_lists_are_closed(kind):
    """Nothing that isn't on the list can be made."""
    with pytest.raises(KeyError):
        kind["SOMETHING_ELSE"]
    with pytest.raises(ValueError, match="not a valid"):
        kind(len(kind))
    with pytest.raises(TypeError, match="cannot extend"):

        class More(kind):
            pass


@pytest.mark.parametrize("kind", [Reason, Flag])
def test_members_stay_themselves_on_the_way_to_a_worker(kind):
    """Pickled, copied, compared: it is the same member."""
    for member in kind:
        assert pickle.loads(pickle.dumps(member)) is member
        assert copy.deepcopy(member) is member


def test_what_was_skipped_need_not_be_tried_again():
    """Only a failure can get better by itself."""
    assert not any(reason.retry for reason in Reason if reason.outcome == "skipped")


@pytest.mark.parametrize("reason", Reason, ids=lambda r: r.code)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_the_way_back_from_a_worker(reason, protocol):
    """Reason, detail and message come out of a pickle as they went in."""
    error = ScanError(reason, "slice 7 of 20 is missing")

    back = pickle.loads(pickle.dumps(error, protocol))

    assert type(back) is ScanError
    assert back.reason is reason
    assert (back.code, back.detail, str(back)) == (reason.code, error.detail, str(error))


def test_a_message_says_what_why_and_what_to_do():
    """Code, detail, advice, in this order."""
    text = str(ScanError(Reason.TRUNCATED, "slice 7 of 20"))

    assert text == f"TRUNCATED: slice 7 of 20. {Reason.TRUNCATED.advice}."
    assert "'lungs'; did you mean lung? " in str(
        ScanError(Reason.NOT_FOUND, "'lungs'; did you mean lung?")
    )


def test_a_message_says_where_the_list_of_series_is():
    """Names of series may name a patient: they are no part of the message."""
    error = ScanError(Reason.SERIES_AMBIGUOUS, "there are 2 series", " # name\n 1 CT of Ann\n")

    assert str(error).endswith("The list is in the error's `private`.")
    assert "Ann" not in str(error)
