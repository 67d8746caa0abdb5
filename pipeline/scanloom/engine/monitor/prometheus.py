"""A run's status in Prometheus' text format, for the node exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Iterable

from scanloom.core import OUTCOMES
from scanloom.engine.monitor.status import Status

Sample = tuple[str, str, str, Iterable[tuple[str, float | None]]]
"""Name, type, help text and (labels, value) pairs; values of None are left out."""

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
"""The characters that the text format escapes in label values."""


def format_metrics(status: Status) -> str:
    """Return the metrics of a run, without case ids, so that their number is small."""
    lines = []
    for name, kind, text, values in _samples(status):
        known = [(labels, value) for labels, value in values if value is not None]
        if known:
            lines += [f"# HELP scanloom_{name} {text}", f"# TYPE scanloom_{name} {kind}"]
            lines += [f"scanloom_{name}{labels} {value!r}" for labels, value in known]
    return "\n".join(lines) + "\n"


def _samples(status: Status) -> list[Sample]:
    counts = {name: getattr(status, name) for name in ("done", *OUTCOMES)}
    devices = [(_labels(device=str(d["device"])), d) for d in status.devices]

    def of_devices(key: str, scale: float = 1.0) -> list[tuple[str, float | None]]:
        values = [(labels, d.get(key)) for labels, d in devices]
        return [(labels, None if v is None else v * scale) for labels, v in values]

    return [
        ("run_info", "gauge", "The run.", [(_labels(run=status.run, state=status.state), 1)]),
        ("cases_planned", "gauge", "Cases of the run.", [("", status.cases)]),
        ("cases_before", "gauge", "Cases done by earlier runs.", [("", status.before)]),
        (
            "cases_finished_total",
            "counter",
            "Cases that this run finished.",
            [(_labels(outcome=name), count) for name, count in counts.items()],
        ),
        (
            "cases_without_result_total",
            "counter",
            "Cases that gave no result, by reason.",
            [(_labels(reason=code), count) for code, count in status.reasons.items()],
        ),
        ("cases_in_flight", "gauge", "Cases that are worked on.", [("", len(status.in_flight))]),
        ("cases_per_hour", "gauge", "Rate of the last minutes.", [("", status.per_hour)]),
        ("left_seconds", "gauge", "Time left by that rate.", [("", status.left_s)]),
        ("elapsed_seconds", "gauge", "Time since the start.", [("", status.elapsed_s)]),
        ("gpu_busy_ratio", "gauge", "Busy share.", of_devices("busy_percent", 0.01)),
        ("gpu_memory_used_bytes", "gauge", "Memory in use.", of_devices("memory_used")),
        ("gpu_memory_bytes", "gauge", "Memory there is.", of_devices("memory_total")),
        ("gpu_temperature_celsius", "gauge", "Temperature.", of_devices("celsius")),
        ("gpu_power_watts", "gauge", "Power.", of_devices("watts")),
        ("written_timestamp_seconds", "gauge", "When this was written.", [("", status.moment)]),
    ]


def _labels(**labels: str) -> str:
    """Return labels in braces, their values escaped."""
    pairs = (f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"
