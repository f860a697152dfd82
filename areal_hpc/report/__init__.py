"""What a person sees of a run: the live console, the status from files alone, and the report with its curves;
and the proof that nothing was lost and nothing trained twice."""

from areal_hpc.report.console import LiveConsole
from areal_hpc.report.evaluation import report_run
from areal_hpc.report.files import write_report
from areal_hpc.report.ledger import ledger_lines, prove_run
from areal_hpc.report.proof import Breach, Proof
from areal_hpc.report.status import status_lines
from areal_hpc.report.summary import Summary, summarise
from areal_hpc.report.why import why_lines

__all__ = [
    "Breach",
    "LiveConsole",
    "Proof",
    "Summary",
    "ledger_lines",
    "prove_run",
    "report_run",
    "status_lines",
    "summarise",
    "why_lines",
    "write_report",
]
