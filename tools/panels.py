"""The kinds of panels that the dashboards are made of (tools/dashboards.py)."""

from __future__ import annotations

from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import prometheus as prometheus_model

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${source}")
FULL, HALF, THIRD = 24, 12, 8
"""Widths; a dashboard is 24 wide."""
HEIGHT = 8


class Query(NamedTuple):
    """One expression, and what its series are called."""

    expr: str
    legend: str = ""


class Steps(NamedTuple):
    """From where on a value is worrying, and bad."""

    orange: float
    red: float


def target(query: Query, number: int = 0) -> prometheus.Dataquery:
    """The query as panels hold it; ``number`` is its place in the panel."""
    made = prometheus.Dataquery().expr(query.expr).datasource(SOURCE).range().ref_id(chr(ord("A") + number))
    return made.legend_format(query.legend) if query.legend else made


def graph(
    title: str, unit: str, why: str, *queries: Query, span: int = HALF, stacked: bool = False
) -> timeseries.Panel:
    """Series over time. ``why``: what to look for, shown behind the panel's question mark."""
    legend = common.VizLegendOptions().placement(common_model.LegendPlacement.BOTTOM).show_legend(True)
    legend = legend.display_mode(common_model.LegendDisplayMode.LIST)
    tooltip = common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI)
    panel = timeseries.Panel().title(title).description(why).unit(unit).datasource(SOURCE).min(0)
    panel = panel.span(span).height(HEIGHT).legend(legend).tooltip(tooltip).fill_opacity(8).line_width(1)
    panel = panel.show_points(common_model.VisibilityMode.NEVER)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL)).fill_opacity(30)
    for number, query in enumerate(queries):
        panel = panel.with_target(target(query, number))
    return panel


def figure(title: str, unit: str, why: str, query: Query, steps: Steps | None = None) -> stat.Panel:
    """One large number; with ``steps`` it turns orange and red, downwards if red is below orange."""
    panel = stat.Panel().title(title).description(why).unit(unit).datasource(SOURCE).span(3).height(4)
    panel = panel.color_mode(common_model.BigValueColorMode.VALUE if steps else common_model.BigValueColorMode.NONE)
    options = common.ReduceDataOptions().calcs(["lastNotNull"])
    panel = panel.reduce_options(options).with_target(target(query))
    if steps is not None:
        rising = steps.red >= steps.orange
        colors = ("green", "orange", "red") if rising else ("red", "orange", "green")
        bounds = (None, *sorted(steps))
        thresholds = [model.Threshold(value=value, color=color) for value, color in zip(bounds, colors, strict=True)]
        config = dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(thresholds)
        panel = panel.thresholds(config)
    return panel


def heat(title: str, why: str, query: Query) -> heatmap.Panel:
    """A histogram's buckets over time."""
    made = target(query).format(prometheus_model.PromQueryFormat.HEATMAP)
    panel = heatmap.Panel().title(title).description(why).datasource(SOURCE).span(HALF).height(HEIGHT)
    axis = heatmap.YAxisConfig().unit("s")
    return panel.calculate(False).y_axis(axis).with_target(made)


def choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """A variable with all values that the data has."""
    made = dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(query).multi(True).include_all(True)
    made = made.all_value(".*").refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return made.sort(model.VariableSort.ALPHABETICAL_ASC).current(
        model.VariableOption(selected=True, text=["All"], value=["$__all"])
    )


def sheet(uid: str, title: str, about: str, *variables: dashboard.QueryVariable) -> dashboard.Dashboard:
    """An empty dashboard."""
    made = dashboard.Dashboard(f"proxyd: {title}").uid(f"proxyd-{uid}").description(about).tags(["proxyd"])
    made = made.refresh("10s").time("now-30m", "now").timezone("browser").tooltip(model.DashboardCursorSync.CROSSHAIR)
    made = made.readonly().link(
        dashboard.DashboardLink("proxyd").type(model.DashboardLinkType.DASHBOARDS).tags(["proxyd"]).keep_time(True)
    )
    made = made.with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
    for variable in variables:
        made = made.with_variable(variable)
    return made
