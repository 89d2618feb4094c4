"""The Prometheus text format, in which servers state their counters and gauges."""

from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchctl.untrusted import METRICS_LINE_CHARS, METRICS_LINES

_LARGEST: Final = 2.0**63


def series_of(page: str) -> dict[str, float]:
    """Counters and gauges of a page, by series: ``name`` or ``name{label="value"}``.

    A value that is not finite means that the server does not know it, and none is beyond 2^63; such series are left
    out. Raises ValueError for other text, and for more than any server states.
    """
    lines = page.split("\n")
    if len(lines) > METRICS_LINES or max(map(len, lines)) > METRICS_LINE_CHARS:
        raise ValueError(
            f"the page has more than {METRICS_LINES} lines, or one of over {METRICS_LINE_CHARS} characters"
        )
    return {
        _series_name(sample): float(sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        # Histogram buckets and times of creation: most of the page, and nothing that is compared
        if not sample.name.endswith(("_bucket", "_created")) and abs(sample.value) < _LARGEST
    }


def _series_name(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}" if labels else sample.name
