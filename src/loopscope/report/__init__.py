"""What does a reader see? Results as data, and the products that are made of them: tables, figures, the page."""

from loopscope.report.results import Source, collect, read_source
from loopscope.report.schema import Results
from loopscope.report.tables import Table, gap_rows

__all__ = ["Results", "Source", "Table", "collect", "gap_rows", "read_source"]
