"""Jobs of the command line: from options to a trained model, and what can be done with one."""

from dpis.app.jobs.options import JobOptions
from dpis.app.jobs.training import JobResult, resume_job, start_job
from dpis.app.jobs.using import evaluate_run, predict_file

__all__ = ["JobOptions", "JobResult", "evaluate_run", "predict_file", "resume_job", "start_job"]
