"""What the keys of charts do, on every screen that has them."""

from __future__ import annotations

from dschat_tui.dashboard.widgets.chart import MARKERS, SMOOTHINGS, Chart, View, moved


class ChartKeys:
    """Cursor, smoothing, scale and markers of a screen's charts, which share one view."""

    view: View
    ascii_only: bool

    def current_chart(self) -> Chart:
        """The chart that keys act on."""
        raise NotImplementedError

    def draw_charts(self) -> None:
        """Draw the charts in sight, where they have changed."""
        raise NotImplementedError

    def look(self, **changes: object) -> None:
        """Change how the charts look at their series."""
        self.view = moved(self.view, **changes)
        self.draw_charts()

    def action_cursor(self, columns: int) -> None:
        """Move the chart cursor by columns of the panel."""
        steps = self.current_chart().steps()
        if not steps:
            return
        at = len(steps) - 1
        if self.view.cursor is not None:
            before = sum(step <= self.view.cursor for step in steps) - 1
            at = min(max(before + columns, 0), len(steps) - 1)
        self.look(cursor=steps[at])

    def action_smooth(self) -> None:
        """The next smoothing."""
        after = SMOOTHINGS.index(self.view.smoothing) + 1
        self.look(smoothing=SMOOTHINGS[after % len(SMOOTHINGS)])

    def action_log_scale(self) -> None:
        """Logarithmic values, or as they are."""
        self.look(log_scale=not self.view.log_scale)

    def action_markers(self) -> None:
        """The next kind of markers, where any but ASCII may be used."""
        names = ["ascii"] if self.ascii_only else list(MARKERS)
        after = names.index(self.view.markers.name) + 1
        self.look(markers=MARKERS[names[after % len(names)]])
