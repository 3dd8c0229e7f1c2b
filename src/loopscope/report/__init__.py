"""What does a reader see? Results as data, tables, figures and the page."""

from loopscope.report.results import Results, Source, collect, read_source
from loopscope.report.tables import Table, gap_rows, tables

__all__ = ["Results", "Source", "Table", "collect", "gap_rows", "read_source", "tables"]
