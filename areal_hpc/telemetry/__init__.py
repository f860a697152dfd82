"""What a run says about itself: records (numbers, one JSON line each), trackers fed from them, and log lines."""

from areal_hpc.telemetry.logs import add_secret, setup_logging
from areal_hpc.telemetry.records import Record, Recorder, RecordReader
from areal_hpc.telemetry.trackers import Trackers, TrackerSink, open_sinks

__all__ = [
    "Record",
    "RecordReader",
    "Recorder",
    "TrackerSink",
    "Trackers",
    "add_secret",
    "open_sinks",
    "setup_logging",
]
