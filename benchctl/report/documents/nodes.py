"""Results by node as a JSON document and as rows of ``nodes_summary.csv``."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

from benchctl.analysis.summary.columns import Value
from benchctl.analysis.summary.nodes import MetricByNode, NodeResults
from benchctl.report.documents.decomposition import ratio_document

NODE_COLUMNS: Final = (
    "variant",
    "cell",
    "metric",
    "node",
    "blocks",
    "ratio",
    "ci_low",
    "ci_high",
    "against_others",
    "against_others_ci_low",
    "against_others_ci_high",
    "p",
)


def nodes_document(results: NodeResults) -> dict[str, Any]:
    """Every deciding metric by node; scatters are standard deviations of log-ratios."""
    return {
        "variant": results.variant,
        "confidence": results.confidence,
        "num_tests": results.num_tests,
        "metrics": [_metric_document(metric) for metric in results.metrics],
    }


def node_values(variants: Iterable[NodeResults]) -> Iterator[Mapping[str, Value]]:
    """A row for each node in each metric of each cell."""
    for results in variants:
        for metric in results.metrics:
            for row in metric.rows:
                interval, against = row.interval or (None, None), row.against_interval or (None, None)
                values = (results.variant, metric.label, metric.metric, row.node, row.num_blocks, row.ratio)
                yield dict(
                    zip(NODE_COLUMNS, (*values, *interval, row.against_others, *against, row.p_value), strict=True)
                )


def _metric_document(metric: MetricByNode) -> dict[str, Any]:
    test, over_nodes = metric.effects.test, metric.over_nodes
    low, high = (over_nodes[1] if over_nodes is not None else None) or (None, None)
    return {
        "cell": metric.label,
        "name": metric.metric,
        "nodes": [asdict(row) for row in metric.rows],
        "over_blocks": ratio_document(metric.over_blocks),
        "over_nodes": None
        if over_nodes is None or metric.effects.over_nodes is None
        else {
            "ratio": over_nodes[0],
            "ci_low": low,
            "ci_high": high,
            "degrees_of_freedom": metric.effects.over_nodes.degrees_of_freedom,
        },
        "sd_within_nodes": metric.within_sd,
        "sd_between_nodes": metric.between_sd,
        "test": None
        if test is None
        else {
            "f": None if test.statistic == float("inf") else test.statistic,
            "df_between": test.df_between,
            "df_within": test.df_within,
            "p": test.p_value,
        },
        "untold": metric.effects.reason,
        "differing": [row.node for row in metric.differing],
    }
