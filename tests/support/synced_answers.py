"""What strace saw of a receiver: whether each answer to a C-STORE came after what it promises."""

from __future__ import annotations

import re
from pathlib import Path

CALLS = "fsync,fdatasync,link,linkat,rename,renameat,renameat2,mkdir,mkdirat,sendto,write"
STRACE = ["strace", "-f", "-y", "-e", f"trace={CALLS}", "-e", "signal=none"]
"""Its option `-y` names the files of descriptors."""

LATE = """
import os, threading
fsync = os.fsync
def late(descriptor):  # a copy of the descriptor: the file may be closed by then
    threading.Timer(0.2, fsync, [os.dup(descriptor)]).start()
os.fsync = late
"""
"""A program that syncs, but after the answer."""
NEVER = """
import os
os.fsync = lambda descriptor: None
"""
"""A program that does not sync at all."""
FOLDERS_NEVER = """
import os, stat
fsync = os.fsync
def files_only(descriptor):
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        fsync(descriptor)
os.fsync = files_only
"""
"""A program that syncs files, and not their names."""


def answers_in(trace: str) -> list[bool]:
    """Return for each answer to a C-STORE whether the object was on the disk before.

    Between two answers on one association, in this order: fsync of the data set in `incoming`; its
    name in `studies` by link or rename, or fsync of the file that has this name already; fsync of
    the folder. Before the answer, each new folder was synced in the one that it is in.

    Parameters
    ----------
    trace : str
        Of `STRACE`, of a receiver with one sender.
    """
    answers, begun = [], dict[str, str]()
    drafts, named, lasting = set[str](), set[str](), False
    folders = set[str]()  # whose names were not synced yet
    for line in trace.splitlines():
        thread, _, call = line.partition(" ")
        call = call.strip()
        # A call counts for the receiver once it has ended, an answer once it has begun
        if call.endswith("<unfinished ...>"):
            begun[thread] = call
            if not call.startswith("sendto"):
                continue
        elif call.startswith("<..."):
            call = begun.pop(thread, "") + call
            if call.startswith("sendto"):
                continue
        if re.search(r"\) += -1 ", call):
            continue
        if match := re.match(r"f(?:data)?sync\(\d+<([^>]*)>", call):
            path = match[1]
            if path.endswith(".part"):
                drafts.add(path)
            elif path.endswith(".dcm") and drafts:  # it had come before
                named.add(str(Path(path).parent))
            lasting |= path in named
            folders = {each for each in folders if str(Path(each).parent) != path}
        elif match := re.match(
            r'(?:link|rename)(?:at2?)?\(.*?"([^"]*\.part)".*?"([^"]*\.dcm)"', call
        ):
            if match[1] in drafts:
                named.add(str(Path(match[2]).parent))
        elif match := re.match(r'mkdir(?:at)?\(.*?"([^"]*/studies/[^"]*)"', call):
            folders.add(match[1])
        # A P-DATA-TF (PS3.8 9.3.5): the receiver sends none but answers
        elif call.startswith("sendto") and '"\\4\\0' in call:
            answers.append(lasting and not folders)
            drafts, named, lasting = set(), set(), False
    return answers
