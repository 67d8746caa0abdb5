"""How the nodes of a site are reached: addresses, certificates, credentials."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from scanloom.core import Reason, ScanError
from scanloom.engine.listen.site import Node
from scanloom.engine.machine.lean_imports import show_modules, without_optional_imports

if TYPE_CHECKING:
    from scanloom.io.network.peer import DicomAddress
    from scanloom.io.network.source import DicomFinder, WebSource


def check_installed(node: Node | None) -> None:
    """Import what is needed for a node, or to receive.

    Raises
    ------
    ScanError
        NOT_INSTALLED without pynetdicom or dicomweb-client.
    """
    try:
        with without_optional_imports():
            from scanloom.io.network.peer import WebConnection
        if node is not None and node.url is not None:
            show_modules("requests")
            WebConnection(node.url, None, None, node.patience)
    except ModuleNotFoundError as exc:
        detail = "DICOM's network is not installed: pip install 'scanloom[hospital]'"
        raise ScanError(Reason.NOT_INSTALLED, detail) from exc


def dicom_address(own_title: str, node: Node) -> DicomAddress:
    """Return the address of a DICOM node.

    Raises
    ------
    ScanError
        ENVIRONMENT if a certificate can't be read.
    """
    from scanloom.io.network.peer import DicomAddress, client_tls

    return DicomAddress(
        own_title=own_title,
        title=str(node.title),
        address=str(node.address),
        port=int(node.port or 0),
        tls=None if node.tls is None else client_tls(**dict(node.tls)),
        host=None if node.tls is None else node.tls.host,
        patience=node.patience,
    )


def web_address(node: Node) -> tuple[str, str | None, str | None, float]:
    """Return the address, credentials, authorities and patience of a DICOMweb server.

    Raises
    ------
    ScanError
        ENVIRONMENT if credentials or authorities can't be read.
    """
    from scanloom.io.network.peer import client_tls, read_credentials

    if node.authorities is not None:  # `requests` reads them later
        client_tls(node.authorities, None, None, None)
    credentials = None
    if (source := node.credentials) is not None:
        value = os.environ.get(source.variable) if source.variable else None
        credentials = read_credentials(source.file, source.variable, value)
    return str(node.url), credentials, node.authorities, node.patience


def make_finder(own_title: str, node: Node) -> DicomFinder | WebSource:
    """Return a connection for questions, which is not open yet.

    Raises
    ------
    ScanError
        ENVIRONMENT if certificates or credentials can't be read.
    """
    from scanloom.io.network.source import DicomFinder, WebSource

    if node.url is not None:
        return WebSource(*web_address(node))
    return DicomFinder(dicom_address(own_title, node))
