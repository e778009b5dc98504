"""The page of a finished run. Needs no torch."""

from dpis.app.page.run_files import RunReport, read_run
from dpis.app.page.run_page import render_run

__all__ = ["RunReport", "read_run", "render_run"]
