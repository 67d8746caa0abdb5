"""`Site`: who may send to this receiver, and how, read from a YAML or JSON file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from scanloom.core import Reason, ScanError, did_you_mean
from scanloom.core.paths import shipped_workflows
from scanloom.engine.workflow.schema import (
    Bytes,
    Name,
    Page,
    Seconds,
    Section,
    Selection,
    listed,
    read_page,
)

MIN_RESERVE_BYTES = 1_000_000
"""A smaller number lacks its unit."""


def _address(value: str) -> str:
    try:
        return str(ip_address(value))
    except ValueError:
        raise ValueError("an address such as 10.0.0.7 or ::1, no name") from None


def _with_unit(value: int) -> int:
    if value < MIN_RESERVE_BYTES:
        raise ValueError("at least 1 MB, and a unit, such as 20 GiB")
    return value


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


SectionOrNone = TypeVar("SectionOrNone", bound=Section | None)


Titles = Annotated[tuple[Title, ...], BeforeValidator(listed)]
Names = Annotated[tuple[str, ...], BeforeValidator(listed)]


class NodeTls(Section, frozen=True):
    """TLS to a node, which has to show a certificate; paths are relative to SITE."""

    authorities: str = Field(description="Authorities that sign its certificate, PEM")
    certificate: str | None = Field(default=None, description="Own certificate, PEM")
    key: str | None = Field(default=None, description="Its private key, PEM")
    host: str | None = Field(
        default=None, description="Name in its certificate; any of `authorities` if none"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("`certificate` and `key`, or neither")
        return self


class Credentials(Section, frozen=True):
    """Where `user:password` or `Bearer TOKEN` of a DICOMweb server stands; never in the page."""

    file: str | None = Field(
        default=None, description="File that its owner alone can read, relative to SITE"
    )
    variable: str | None = Field(default=None, description="Environment variable")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.file is None) == (self.variable is None):
            raise ValueError("`file` or `variable`, one of them")
        return self


class Node(Section, frozen=True):
    """A peer that we connect to: a DICOM node, or a DICOMweb server by its `url`."""

    title: Title | None = Field(default=None, description="Its AE title")
    address: Annotated[str, AfterValidator(_address)] | None = Field(
        default=None, description="Its IP address"
    )
    port: int | None = Field(default=None, ge=1, le=65535, description="Its TCP port")
    tls: NodeTls | None = Field(default=None, description="TLS, for `title`")
    url: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s@/?#]+(/[^\s@?#]*)?$",
        description="Address of DICOMweb that ends before /studies, without credentials",
        examples=["https://pacs.local/dicom-web"],
    )
    credentials: Credentials | None = Field(default=None, description="Credentials, for `url`")
    authorities: str | None = Field(
        default=None,
        description="Authorities that sign the certificate of `url`, PEM; default: certifi's",
    )
    patience: Seconds = Field(default=60.0, description="Longest wait for an answer")

    @model_validator(mode="after")
    def _check_node(self) -> Self:
        dicom = (self.title, self.address, self.port)
        if self.url is not None and self.url.rstrip("/").endswith("/studies"):
            raise ValueError("`url` without /studies at its end, which is added to it")
        if self.url is None:
            if None in dicom:
                raise ValueError("`title`, `address` and `port`, or `url`")
            if self.credentials is not None or self.authorities is not None:
                raise ValueError("`credentials` and `authorities` with `url` only")
        elif dicom != (None, None, type(self).model_fields["port"].default) or self.tls is not None:
            raise ValueError("`title`, `address`, `port` and `tls`, or `url`")
        return self

    def absolute(self, folder: Path) -> Self:
        """Return the node with absolute paths, of those that are relative to a folder."""
        changed = {
            "tls": _absolute(self.tls, folder, "authorities", "certificate", "key"),
            "credentials": _absolute(self.credentials, folder, "file"),
        }
        node = self.model_copy(update=changed)
        return _absolute(node, folder, "authorities")


class Ask(Node, frozen=True):
    """The query service of a sender (C-FIND or QIDO-RS): how many instances it has."""

    port: int = Field(default=104, ge=1, le=65535, description="Its TCP port")
    patience: Seconds = Field(default=15.0, description="Longest wait for an answer")
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


def _answer(value: object) -> object:
    """Return the words that YAML takes for true and false."""
    return {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value


class Hours(NamedTuple):
    """A part of the day, in minutes since midnight; it may go past midnight."""

    start: int
    end: int

    def contains(self, minute: int) -> bool:
        """Return whether a minute of the day lies in it; its end does not."""
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end

    def __str__(self) -> str:
        return "-".join(f"{each // 60:02}:{each % 60:02}" for each in self)


def _hours(value: object) -> object:
    """Return the hours of a text."""
    match = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)", str(value))
    if not isinstance(value, str) or match is None:
        if value is None or isinstance(value, list | tuple):  # of a document of ours
            return value
        raise ValueError("hours such as 19:00-06:00, in quotes")
    numbers = [int(group) for group in match.groups()]
    start, end = numbers[0] * 60 + numbers[1], numbers[2] * 60 + numbers[3]
    if start == end:
        raise ValueError("two different times; leave `hours` out for all day")
    return start, end


class Committer(Section, frozen=True):
    """Where a target is asked for storage commitment, if not where it stores; TLS as there."""

    title: Title = Field(description="Its AE title")
    address: Annotated[str, AfterValidator(_address)] | None = Field(
        default=None, description="Its IP address; that of the target, if left out"
    )
    port: int = Field(ge=1, le=65535, description="Its TCP port")


class Target(Node, frozen=True):
    """Where results go: to `title`, `address` and `port` by C-STORE, or to `url` by STOW-RS."""

    name: Name = Field(description="Name of the target: a-z, 0-9, _ and -")
    commitment: Annotated[
        Literal["yes", "no", "auto"], BeforeValidator(_answer, json_schema_input_type=str | bool)
    ] = Field(
        default="auto",
        description="Whether to ask for storage commitment: yes; no, and ask by C-FIND whether an "
        "object is there; auto, the first if the target offers it, else the second",
    )
    committer: Committer | None = Field(
        default=None, description="Where it is asked for storage commitment, if not at `port`"
    )
    reporters: Networks = Field(
        default=(),
        description="Further addresses from which it reports commitment, under its title",
    )
    retry: Seconds = Field(
        default=60.0, description="Wait before the second attempt; it doubles up to 1 h"
    )
    give_up: Seconds = Field(
        default=72 * 3600.0, description="How long a target that does not take anything is tried"
    )
    report_within: Seconds = Field(
        default=1800.0, description="Longest wait for a report of commitment, before asking again"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.url is not None and (self.reporters or self.committer is not None):
            raise ValueError("`reporters` and `committer`, or `url`")
        if self.url is not None and self.commitment == "yes":
            raise ValueError("`commitment: yes` without `url`: DICOMweb has none")
        return self


class Destination(Section, frozen=True):
    """Where a source sends by C-MOVE: it has to know this title, with our address and this port."""

    title: Title = Field(description="Own AE title")
    port: int = Field(ge=0, le=65535, description="Own TCP port")


class Source(Node, frozen=True):
    """Where scans are fetched from: by C-FIND and C-GET or C-MOVE, or by QIDO-RS and WADO-RS."""

    name: Name = Field(description="Name of the source: a-z, 0-9, _ and -")
    retrieve: Literal["auto", "get", "move"] = Field(
        default="auto",
        description="By C-GET or C-MOVE; auto, C-GET, and C-MOVE for what it does not give so",
    )
    destination: Destination | None = Field(
        default=None,
        description="Own title and port for C-MOVE; those of the site, if left out. A receiver "
        "that runs has those",
    )
    senders: Networks = Field(
        default=(), description="Further addresses that it sends from by C-MOVE, under its title"
    )
    hours: Annotated[Hours | None, BeforeValidator(_hours, json_schema_input_type=str)] = Field(
        default=None,
        description="When it may be asked, local time; what has begun is finished",
        examples=["19:00-06:00"],
    )
    associations: int = Field(
        default=1, ge=1, le=16, description="Studies that are fetched at a time"
    )
    per_second: float | None = Field(
        default=None, gt=0, description="Objects that are taken in a second at most"
    )
    bytes_per_second: Bytes | None = Field(
        default=None, ge=1, description="Bytes that are taken in a second at most"
    )
    retry: Seconds = Field(
        default=10.0, description="Wait before it is tried again; three times in all"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        of_dicom = self.destination is not None or self.senders or self.retrieve != "auto"
        if self.url is not None and of_dicom:
            raise ValueError("`retrieve`, `destination` and `senders`, or `url`")
        return self


class Site(Page, frozen=True):
    """A receiver: its address, those who may send to it, and where it keeps what they send."""

    title: Title = Field(
        default="SCANLOOM", description="Own AE title, by which senders have to call it"
    )
    address: Annotated[str, AfterValidator(_address)] = Field(
        default="127.0.0.1",
        description="Address to listen at; 0.0.0.0 for all of this machine",
    )
    port: int = Field(default=11112, ge=0, le=65535, description="TCP port; 0 for a free one")
    peers: tuple[Peer, ...] = Field(default=(), description="Those who may send; needed to receive")
    tls: Tls | None = Field(default=None, description="TLS with certificates of the senders")
    spool: str | None = Field(
        default=None,
        description="Folder for what was received, relative to SITE; default OUT/private/spool",
    )
    reserve: Annotated[Bytes, AfterValidator(_with_unit)] = Field(
        default=5 << 30,
        description="Free disk space below which nothing is received: 5 GiB, or twice the largest "
        "study if that is more",
    )
    changed: Literal["newest", "first"] = Field(
        default="newest",
        description="Which one to keep of several objects with one SOPInstanceUID",
    )
    limits: Limits = Field(default=Limits(), description="Limits of associations")
    targets: tuple[Target, ...] = Field(default=(), description="Where results are sent")
    sources: tuple[Source, ...] = Field(default=(), description="Where scans are fetched from")
    fetched: str | None = Field(
        default=None,
        description="Folder for what was fetched, relative to SITE; default OUT/private/fetched",
    )
    clear_after: Seconds | None = Field(
        default=None,
        description="So long after all results of a study were delivered, or after it came if "
        "there are none to deliver, it is removed from the spool; never, if left out",
    )
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
    metrics: str | None = Field(
        default=None, description="File of metrics for Prometheus (textfile), relative to SITE"
    )
    cluster: str = Field(default="local", description="Where networks run, as `run --cluster`")

    @model_validator(mode="after")
    def _check(self) -> Self:
        titles = [peer.title for peer in self.peers]
        if len(set(titles)) < len(titles):
            raise ValueError("a title once among the peers, with all its addresses")
        if not (self.peers or self.targets or self.sources):
            raise ValueError("`peers`: those who may send; or `targets`, or `sources`")
        for kind in ("targets", "sources"):
            names = [node.name for node in getattr(self, kind)]
            if len(set(names)) < len(names):
                raise ValueError(f"a name once among the {kind}")
        names = [target.name for target in self.targets]
        if self.longest_wait < self.quiet:
            raise ValueError("longest_wait at least as long as quiet")
        if self.clear_after is not None and not (self.rules or self.targets):
            raise ValueError("`clear_after` with `rules` or `targets`: else nothing is removed")
        unknown = {title for rule in self.rules for title in rule.senders} - set(titles)
        if unknown:
            raise ValueError(f"`from` of a rule: {', '.join(sorted(unknown))} is no peer")
        unknown = {name for rule in self.rules for name in rule.send} - set(names)
        if unknown:
            raise ValueError(f"`send` of a rule: {', '.join(sorted(unknown))} is no target")
        reachable = not ip_address(self.address).is_loopback and self.tls is None
        if reachable and not all(peer.addresses for peer in self.peers):
            raise ValueError(
                "`addresses` for each peer, or `tls`: others can reach this address, and a title "
                "is no secret"
            )
        return self

    @property
    def rules_digest(self) -> str:
        """Digest of the rules, by which a study that none fits is looked at again."""
        rules = json.dumps([rule.model_dump_json() for rule in self.rules])
        return hashlib.sha256(rules.encode()).hexdigest()


def read_site(path: Path) -> Site:
    """Read a site from a YAML or JSON file; its paths become absolute.

    Raises
    ------
    ScanError
        SITE, with line, key, expected value and nearest valid word for each mistake.
    """
    site = read_page(path, Site, Reason.SITE)
    folder = path.absolute().parent
    workflows = shipped_workflows()
    changed = {
        "targets": tuple(target.absolute(folder) for target in site.targets),
        "sources": tuple(source.absolute(folder) for source in site.sources),
        "peers": tuple(
            peer if peer.ask is None else peer.model_copy(update={"ask": peer.ask.absolute(folder)})
            for peer in site.peers
        ),
        "rules": tuple(
            rule.model_copy(
                update={"workflow": str(workflows.get(rule.workflow, folder / rule.workflow))}
            )
            for rule in site.rules
        ),
        "tls": _absolute(site.tls, folder, "certificate", "key", "clients"),
    }
    return _absolute(site, folder, "spool", "fetched", "metrics").model_copy(update=changed)


NodeT = TypeVar("NodeT", Target, Source)


def find_node(nodes: Sequence[NodeT], name: str, kind: Literal["target", "source"]) -> NodeT:
    """Return the target, or the source, of this name.

    Raises
    ------
    ScanError
        SITE if there is none.
    """
    named = {node.name: node for node in nodes}
    if name not in named:
        expected = did_you_mean(name, list(named)) if named else "the site has none"
        raise ScanError(Reason.SITE, f"no {kind} is called {name}: {expected}")
    return named[name]


def _absolute(section: SectionOrNone, folder: Path, *names: str) -> SectionOrNone:
    """Return a section whose fields of these names are absolute paths."""
    if section is None:
        return section
    paths = {name: getattr(section, name) for name in names}
    absolute = {name: str(folder / path) for name, path in paths.items() if path is not None}
    return section.model_copy(update=absolute)
