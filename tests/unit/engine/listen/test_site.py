"""The page of a receiver: mistakes are named by line, and what is open to others is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scanloom.core import Reason, ScanError
from scanloom.engine.listen.site import Site, read_site
from support.real_scans import ROOT


def read(tmp_path: Path, text: str) -> Site:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    return read_site(path)


def test_a_peer_is_enough(tmp_path: Path) -> None:
    site = read(tmp_path, "peers: [{title: PACS}]\n")

    assert (site.title, site.address, site.port) == ("SCANLOOM", "127.0.0.1", 11112)
    assert (site.tls, site.spool, site.changed, site.reserve) == (None, None, "newest", 5 << 30)


def test_paths_are_relative_to_the_page(tmp_path: Path) -> None:
    text = "peers: [{title: A}]\nspool: in\ntls: {certificate: a.pem, key: /k, clients: c.pem}\n"
    site = read(tmp_path, text)

    assert site.tls is not None
    assert (site.spool, site.tls.key) == (str(tmp_path / "in"), "/k")
    assert site.tls.certificate == str(tmp_path / "a.pem")


TARGETS = "peers: [{title: A}]\ntargets:\n"
RULE = "peers: [{title: A}]\nrules:\n- workflow: a.yaml"


def test_rules_name_files_beside_the_page_and_shipped_workflows(tmp_path: Path) -> None:
    rules = "rules: [{from: A, workflow: a.yaml, send: pacs}, {workflow: ct_tissue}]\n"
    first, second = read(tmp_path, f"{TARGETS}- {{name: pacs, url: 'http://x'}}\n{rules}").rules

    assert (first.senders, first.send) == (("A",), ("pacs",))
    assert first.workflow == str(tmp_path / "a.yaml")
    assert (second.senders, Path(second.workflow).name) == ((), "ct_tissue.yaml")
    assert Path(second.workflow).is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title: A\n", "`peers`: those who may send; or `targets`, or `sources`"),
        ("peers: []\n", "`peers`: those who may send"),
        ("peers: [{title: A}]\nprot: 104\n", "line 2: prot is not a key here; did you mean port?"),
        ("peers: [{title: A}]\ntls: {kee: a}\n", "tls.kee is not a key here; did you mean key?"),
        ("peers: [{title: A}]\nport: 70000\n", "line 2: port: expected less than or equal"),
        ("peers:\n- title: A SEVENTEEN CHARS\n", "line 2: peers.title: expected calling AE title"),
        ("peers:\n- title: A\n  addresses: pacs.local\n", "line 3: peers.addresses: expected addr"),
        ("peers: [{title: A}]\naddress: pacs\n", "line 2: address: expected an address such as"),
        ("peers: [{title: A}, {title: A}]\n", "a title once among the peers"),
        ("peers: [{title: A}]\naddress: 0.0.0.0\n", "`addresses` for each peer, or `tls`"),
        ("peers: [{title: A}]\nreserve: 20\n", "line 2: reserve: expected a number and a unit"),
        ("peers: [{title: A}]\nchanged: last\n", "line 2: changed: expected one of newest, first"),
        ("peers: [{title: A}]\nlimits: {idle: 0}\n", "line 2: limits.idle: expected greater than"),
        ("- a\n", "a site is a mapping"),
        (
            TARGETS + "- {name: A, url: 'http://x'}\n",
            "line 3: targets.name: expected a name of a-z",
        ),
        (TARGETS + "- {name: a, title: A}\n", "`title`, `address` and `port`, or `url`"),
        (TARGETS + "- {name: a, title: A, address: b, port: 1}\n", "expected an address such as"),
        (TARGETS + "- {name: a, url: 'http://u:p@x/'}\n", "line 3: targets.url: expected address"),
        (TARGETS + "- {name: a, url: 'http://x', port: 1}\n", "`port` and `tls`, or `url`"),
        (
            TARGETS + "- {name: a, url: 'http://x/rs/studies/'}\n",
            "`url` without /studies at its end",
        ),
        (TARGETS + "- {name: a, url: 'http://x', commitment: yes}\n", "DICOMweb has none"),
        (TARGETS + "- {name: a, url: 'http://x', credentials: {}}\n", "`file` or `variable`"),
        (TARGETS + "- {name: a, url: 'http://x'}\n" * 2, "a name once among the targets"),
        ("peers: [{title: A}]\nrules: [{from: A}]\n", "line 2: rules.workflow is missing"),
        (f"{RULE}\n  form: A\n", "line 4: rules.form is not a key here; did you mean from?"),
        (f"{RULE}\n  from: PACS\n", "`from` of a rule: PACS is no peer"),
        (f"{RULE}\n  send: pacs\n", "`send` of a rule: pacs is no target"),
        (f"{RULE}\n  from: A TITLE OF TOO MANY\n", "line 4: rules.from: expected calling titles"),
        (f"{RULE}\n  select: {{modality: XX}}\n", "line 4: rules.select.modality"),
        ("peers: [{title: A}]\nclear_after: 168 h\n", "`clear_after` with `rules` or `targets`"),
        (f"{RULE}\nquiet: 2 min\nlongest_wait: 1 min\n", "longest_wait at least as long as"),
        (
            "peers:\n- title: A\n  ask: {title: Q, address: pacs}\n",
            "line 3: peers.ask.address: exp",
        ),
    ],
)
def test_a_mistake_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ScanError) as refused:
        read(tmp_path, text)
    assert refused.value.reason is Reason.SITE
    assert message in refused.value.detail


SOURCES = "sources:\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: a, title: A}\n", "`title`, `address` and `port`, or `url`"),
        ("- {name: a, url: 'http://x', retrieve: get}\n", "`destination` and `senders`, or `url`"),
        ("- {name: a, url: 'http://x', title: A}\n", "`port` and `tls`, or `url`"),
        ("- {name: a, url: 'http://x', hours: 19-6}\n", "hours such as 19:00-06:00, in quotes"),
        ("- {name: a, url: 'http://x', hours: '24:00-06:00'}\n", "hours such as 19:00-06:00"),
        ("- {name: a, url: 'http://x', hours: '06:00-06:00'}\n", "two different times"),
        ("- {name: a, url: 'http://x', per_second: 0}\n", "line 2: sources.per_second: expected"),
        ("- {name: a, url: 'http://x'}\n" * 2, "a name once among the sources"),
    ],
)
def test_a_mistake_of_a_source_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ScanError) as refused:
        read(tmp_path, SOURCES + text)
    assert message in refused.value.detail


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [("19:00-06:00", (1140, 1439, 0, 359), (360, 1139)), ("08:30-09:00", (510, 539), (509, 540))],
)
def test_hours_may_go_past_midnight(
    hours: str, inside: tuple[int, ...], outside: tuple[int, ...], tmp_path: Path
) -> None:
    (source,) = read(
        tmp_path, SOURCES + f"- {{name: a, url: 'http://x', hours: '{hours}'}}\n"
    ).sources

    assert source.hours is not None
    assert str(source.hours) == hours
    assert all(map(source.hours.contains, inside))
    assert not any(map(source.hours.contains, outside))


def test_a_page_goes_to_processes_and_back(tmp_path: Path) -> None:
    """As `listen` hands it to its parts, with paths that are absolute by then."""
    text = """fetched: scans
peers: [{title: A, ask: {url: "https://x", credentials: {file: c}, authorities: ca.pem}}]
sources: [{name: a, url: "https://x", hours: "19:00-06:00", authorities: ca.pem}]
targets: [{name: t, title: T, address: 10.0.0.1, port: 104, committer: {title: C, port: 105}}]
"""
    site = read(tmp_path, text)

    assert Site.model_validate(site.model_dump(mode="json", by_alias=True)) == site
    ask = site.peers[0].ask
    assert ask is not None
    assert ask.credentials is not None
    assert ask.credentials.file == str(tmp_path / "c")
    assert ask.authorities == site.sources[0].authorities == str(tmp_path / "ca.pem")
    assert site.fetched == str(tmp_path / "scans")


def test_others_may_send_from_given_addresses_or_with_certificates(tmp_path: Path) -> None:
    peer = "address: 0.0.0.0\npeers: [{title: A, addresses: 10.0.0.9/24}]\n"
    assert read(tmp_path, peer).peers[0].addresses == ("10.0.0.0/24",)
    tls = "tls: {certificate: a, key: b, clients: c}\n"
    assert read(tmp_path, f"address: '::'\npeers: [{{title: A}}]\n{tls}").tls is not None


def test_a_target_says_yes_and_no_in_words_and_has_absolute_paths(tmp_path: Path) -> None:
    text = """peers: [{title: A}]
targets:
- {name: one, title: P, address: 10.0.0.1, port: 104, commitment: yes, reporters: 10.0.0.0/24,
   tls: {authorities: a.pem}}
- {name: two, url: "https://pacs/dicom-web", credentials: {file: c}, authorities: /a,
   commitment: no}
"""
    one, two = read(tmp_path, text).targets

    assert one.commitment == "yes"
    assert one.tls is not None
    assert one.tls.authorities == str(tmp_path / "a.pem")
    assert one.reporters == ("10.0.0.0/24",)
    assert two.commitment == "no"
    assert two.credentials is not None
    assert (two.credentials.file, two.authorities) == (str(tmp_path / "c"), "/a")


def test_the_published_schema_is_current() -> None:
    """If this fails: python docs/write_schema.py."""
    published = json.loads((ROOT / "docs" / "site.schema.json").read_text())

    assert published == Site.model_json_schema()
