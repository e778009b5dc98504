"""Pages for readers: of one training run, and of the paper's tables beside our rows. Needs no torch."""

from dpis.report.reproduction_page import render_page
from dpis.report.reproduction_text import render_text
from dpis.report.run_files import RunReport, read_run
from dpis.report.run_page import render_run

__all__ = ["RunReport", "read_run", "render_page", "render_run", "render_text"]
