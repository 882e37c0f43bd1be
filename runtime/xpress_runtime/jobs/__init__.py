"""Batch jobs: a file of requests becomes a file of results, through crashes, hangs and restarts.

The supervisor (:mod:`xpress_runtime.jobs.run`) owns both files and never loads a model; a worker process
(:mod:`xpress_runtime.jobs.worker`) owns the session and never touches a file of the batch.
"""
