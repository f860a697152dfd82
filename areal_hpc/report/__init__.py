"""What a person sees of a run: the live console, the status from files alone, and the report with its curves."""

from areal_hpc.report.console import LiveConsole
from areal_hpc.report.files import write_report
from areal_hpc.report.status import status_lines
from areal_hpc.report.summary import Summary, summarise

__all__ = ["LiveConsole", "Summary", "status_lines", "summarise", "write_report"]
