"""`Site`: who may send to this receiver, and how, read from a YAML or JSON file."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from scanloom.core import Reason
from scanloom.core.paths import shipped
from scanloom.engine.workflow.schema import (
    Bytes,
    Seconds,
    Section,
    Selection,
    listed,
    read_page,
)


def _address(value: str) -> str:
    try:
        return str(ip_address(value))
    except ValueError:
        raise ValueError("an address such as 10.0.0.7 or ::1, no name") from None


def _network(value: str) -> str:
    try:
        return str(ip_network(value, strict=False))
    except ValueError:
        raise ValueError("addresses such as 10.0.0.7 or 10.0.0.0/24, no names") from None


Title = Annotated[
    str,
    Field(
        pattern=r"^[!-\[\]-~]([ -\[\]-~]{0,14}[!-\[\]-~])?$",
        description="AE title: 1 to 16 ASCII characters, no backslash",
        examples=["SCANLOOM"],
    ),
]
Networks = Annotated[tuple[Annotated[str, AfterValidator(_network)], ...], BeforeValidator(listed)]


Titles = Annotated[tuple[Title, ...], BeforeValidator(listed)]
Names = Annotated[tuple[str, ...], BeforeValidator(listed)]


class Ask(Section, frozen=True):
    """The query service (C-FIND) of a sender, which says how many instances it has."""

    title: Title = Field(description="Its AE title: 1 to 16 ASCII characters, no backslash")
    address: Annotated[str, AfterValidator(_address)] = Field(description="Its IP address")
    port: int = Field(default=104, ge=1, le=65535, description="Its TCP port")
    series: Literal["all", "received"] = Field(
        default="all",
        description="Series of a study that have to be complete: all that it has, or those of "
        "which something was received, for a sender that sends a part",
    )


class Peer(Section, frozen=True):
    """A sender: its AE title and its addresses."""

    title: Title = Field(description="Calling AE title: 1 to 16 ASCII characters, no backslash")
    addresses: Networks = Field(
        default=(),
        description="Addresses or networks that it sends from, such as 10.0.0.0/24; any if empty",
    )
    ask: Ask | None = Field(default=None, description=Ask.__doc__)


class Rule(Section, frozen=True):
    """Which studies a workflow segments: the first rule that fits a study decides."""

    model_config = ConfigDict(populate_by_name=True)

    senders: Titles = Field(
        default=(),
        alias="from",
        description="Calling titles of peers, of which one has sent to the study; any if empty",
    )
    select: Selection = Field(
        default=Selection(),
        description="Criteria that one series of the study has to meet, as in a workflow",
    )
    workflow: str = Field(
        description="Workflow file, relative to SITE, or the name of one that ships"
    )
    send: Names = Field(default=(), description="Targets that results are sent to, by name")


class Tls(Section, frozen=True):
    """TLS, which each sender has to use with its own certificate; paths are relative to SITE."""

    certificate: str = Field(description="Certificate of this receiver, PEM")
    key: str = Field(description="Its private key, PEM")
    clients: str = Field(description="Authorities that sign the senders' certificates, PEM")


class Limits(Section, frozen=True):
    """Limits that no sender can exceed, whatever it does."""

    associations: int = Field(default=25, ge=1, le=200, description="Associations at a time")
    pdu: Bytes = Field(default=1 << 17, ge=4096, le=1 << 24, description="Largest PDU, bytes")
    idle: Seconds = Field(
        default=60.0, description="Longest wait for the next PDU of an association, or for its end"
    )
    handshake: Seconds = Field(
        default=15.0, description="Longest wait for TLS, and then for the request of an association"
    )


class Site(Section, frozen=True):
    """A receiver: its address, those who may send to it, and where it keeps what they send."""

    title: Title = Field(
        default="SCANLOOM", description="Own AE title, by which senders have to call it"
    )
    address: Annotated[str, AfterValidator(_address)] = Field(
        default="127.0.0.1",
        description="Address to listen at; 0.0.0.0 for all of this machine",
    )
    port: int = Field(default=11112, ge=0, le=65535, description="TCP port; 0 for a free one")
    peers: tuple[Peer, ...] = Field(min_length=1, description="Those who may send")
    tls: Tls | None = Field(default=None, description="TLS with certificates of the senders")
    spool: str | None = Field(
        default=None,
        description="Folder for what was received, relative to SITE; default OUT/private/spool",
    )
    reserve: Bytes = Field(
        default=5 << 30,
        description="Free disk space below which nothing is received: 5 GiB, or twice the largest "
        "study if that is more",
    )
    changed: Literal["newest", "first"] = Field(
        default="newest",
        description="Which one to keep of several objects with one SOPInstanceUID",
    )
    limits: Limits = Field(default=Limits(), description="Limits of associations")
    rules: tuple[Rule, ...] = Field(
        default=(), description="What is segmented, and how; nothing without rules"
    )
    quiet: Seconds = Field(
        default=60.0, description="A study is whole when nothing of it came for so long"
    )
    longest_wait: Seconds = Field(
        default=1800.0,
        description="After so long it is segmented in any case, with the flag MAYBE_INCOMPLETE",
    )
    cluster: str = Field(default="local", description="Where networks run, as --cluster of run")

    @model_validator(mode="after")
    def _check(self) -> Self:
        titles = [peer.title for peer in self.peers]
        if len(set(titles)) < len(titles):
            raise ValueError("a title once among the peers, with all its addresses")
        if self.longest_wait < self.quiet:
            raise ValueError("longest_wait at least as long as quiet")
        unknown = {title for rule in self.rules for title in rule.senders} - set(titles)
        if unknown:
            raise ValueError(f"`from` of a rule: {', '.join(sorted(unknown))} is no peer")
        reachable = not ip_address(self.address).is_loopback and self.tls is None
        if reachable and not all(peer.addresses for peer in self.peers):
            raise ValueError(
                "`addresses` for each peer, or `tls`: others can reach this address, and a title "
                "is no secret"
            )
        return self


def read_site(path: Path) -> Site:
    """Read a site from a YAML or JSON file; its paths become absolute.

    Raises
    ------
    ScanError
        SITE, with line, key, expected value and nearest valid word for each mistake.
    """
    site = read_page(path, Site, Reason.SITE)
    folder = path.absolute().parent
    spool = None if site.spool is None else str(folder / site.spool)
    shipped_ones = {path.stem: path for path in shipped("workflows").glob("*.yaml")}
    rules = tuple(
        rule.model_copy(
            update={"workflow": str(shipped_ones.get(rule.workflow, folder / rule.workflow))}
        )
        for rule in site.rules
    )
    site = site.model_copy(update={"spool": spool, "rules": rules})
    if site.tls is None:
        return site
    files = {name: str(folder / value) for name, value in dict(site.tls).items()}
    return site.model_copy(update={"tls": Tls(**files)})
