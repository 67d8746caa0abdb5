"""`scanloom listen`: receive studies that DICOM peers send, and segment them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scanloom.cli.console import error_boundary, report_new_key, say
from scanloom.cli.options import General, KeyOptions, OutOptions, takes_panels


@takes_panels
def listen(
    site: Annotated[
        Path,
        typer.Argument(metavar="SITE", help="YAML file: own title and port, peers, rules, limits."),
    ],
    output: OutOptions,
    key: KeyOptions,
    general: General,
) -> None:
    """Receive studies that DICOM peers send, and segment them by the rules of SITE.

    They are kept in OUT/private/spool: what a sender was told is stored is on the disk. Stop it
    with Ctrl-C or SIGTERM.

    Example: scanloom listen site.yaml -o results
    """
    with error_boundary(general.mode):
        from scanloom.engine.listen.listen import listen as receive_and_segment
        from scanloom.engine.listen.site import read_site

        page = read_site(site)

        def tell(address: str, port: int, spool: Path) -> None:
            say(f"Listening at {address} port {port} as {page.title}. Spool: {spool}")

        with report_new_key(key.key):
            receive_and_segment(page, output.out, tell, key.key)
        say("Stopped.")
