"""Write the table of attributes in `reading.md` from `scanloom.io.dicom.slice_attributes`.

python docs/write_attributes.py
"""

from __future__ import annotations

from pathlib import Path

from scanloom.io.dicom.slice_attributes import SLICE_ATTRIBUTES, Rule, SliceAttribute

PAGE = Path(__file__).with_name("reading.md")
BEGIN = "<!-- Written by docs/write_attributes.py from io/dicom/slice_attributes.py: begin -->\n"
END = "<!-- end -->\n"
ABSENT = {
    "differs": "another value",
    "flagged": "SLICES_DIFFER",
    "ignored": "",
    "says nothing": "as none",
}


def table() -> str:
    """Return the table: the attributes of each rule, in their order."""
    lines: list[str] = []
    for rule, title in (
        (Rule.MEANING, "never mixed"),
        (Rule.RECORDED, "flagged: SLICES_DIFFER"),
    ):
        lines += ["", f"| {title} | equal values | missing in some slices | |", "|-|-|-|-|"]
        lines += [row(attribute) for attribute in SLICE_ATTRIBUTES if attribute.rule is rule]
    lines += ["", "| ignored | |", "|-|-|"]
    varying = (attribute for attribute in SLICE_ATTRIBUTES if attribute.rule is Rule.VARIES)
    lines += [f"| {attribute.name} | {attribute.why} |" for attribute in varying]
    return "\n".join([*lines[1:], ""])


def row(attribute: SliceAttribute) -> str:
    """Return the line of an attribute whose values are compared."""
    missing = ABSENT[attribute.absent]
    return f"| {attribute.name} | {attribute.tolerance} | {missing} | {attribute.why} |"


def page(text: str) -> str:
    """Return the page with the table of the code."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PAGE.name}: {len(SLICE_ATTRIBUTES)} attributes")
