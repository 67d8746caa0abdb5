"""`OUT/engines/`: the engine of each network, decided by the first process that runs it.

The decision depends on measurements, so that another machine, or the same one tomorrow, may decide
otherwise. All cases of an output folder keep the first decision, whoever makes them. An entry is a
folder that is filled in `.work` and renamed: a rename never replaces a folder with content, so that
exactly one of several processes succeeds, on file systems without hard links or locks too.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from scanloom.core import Reason, read_error
from scanloom.core.engines import EngineRecord
from scanloom.io.output.json_file import read_json, write_document
from scanloom.io.output.private import check_links
from scanloom.io.output.work_folder import WorkEntry, make_work_folder
from scanloom.io.system.atomic_write import fsync_path
from scanloom.io.system.disk_errors import output_error

ENGINES = "engines"
_DOCUMENT = "engine.json"


def remove_unused_engines(out: Path) -> None:
    """Remove a new output folder in which nothing is but engines: no case could be written."""
    with suppress(OSError):
        if [path.name for path in out.iterdir()] == [ENGINES]:
            shutil.rmtree(out / ENGINES)
            out.rmdir()


class OutputEngines:
    """The engines of an output folder's networks, as `scanloom.core.engines.EngineRecords`.

    Parameters
    ----------
    out : Path
        The output folder, which need not exist.
    """

    def __init__(self, out: Path) -> None:
        self._out = out

    def recorded(self, network: str) -> EngineRecord | None:
        """Return the decision for a network; None before there is one.

        Raises
        ------
        ScanError
            RESULT_DAMAGED if the record can't be read: without it, cases could be mixed.
        """
        check_links(self._out)
        file = self._out / ENGINES / network / _DOCUMENT
        try:
            if file.is_symlink() or file.parent.is_symlink():
                raise ValueError("a link")  # noqa: TRY301  # as if damaged
            document = read_json(file)
            return EngineRecord(str(document["engine"]), str(document["precision"]))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError) as exc:
            raise read_error(exc, f"{ENGINES}/{network}", Reason.RESULT_DAMAGED) from exc

    def record(self, network: str, decision: EngineRecord) -> EngineRecord:
        """Record a decision unless there is one; return the one that is recorded now.

        Raises
        ------
        ScanError
            OUTPUT_UNWRITABLE, DISK_FULL and the like if it can't be written.
        """
        target = self._out / ENGINES / network
        draft = self._out / ".work" / str(WorkEntry.of_this_process(network))
        try:
            make_work_folder(self._out, draft.name)
            target.parent.mkdir(exist_ok=True)
            document = {"engine": decision.engine, "precision": decision.precision}
            write_document(draft / _DOCUMENT, document)
            fsync_path(draft / _DOCUMENT)
            fsync_path(draft)
            try:
                draft.rename(target)
            except OSError:  # another process was first, or the disk is at fault
                if (first := self.recorded(network)) is None:
                    raise
                return first
            fsync_path(target.parent)
        except OSError as exc:
            raise output_error(exc) from exc
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            with suppress(OSError):  # not empty: others write there
                draft.parent.rmdir()
        return decision
