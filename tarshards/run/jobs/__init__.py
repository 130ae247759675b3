"""Run a command for each of many shards: here, on Ray, by Slurm or by Kubernetes, resumed by done-markers.

Read in this order:

- ``job_plan``: items and a command to tasks; ``job_options``: the options of a job for a scheduler
- ``attempt``: the record that an attempt at an item writes before it starts, for the next attempt to clean up
- ``worker``: runs one task and writes its markers; ``__main__``: the worker as a program, for Slurm;
  ``init_process``: the worker as process 1 of a container
- ``local_run``: tasks on this machine; ``remote_worker``: the same by calls of an executor; ``scheduler``: the parts
  common to Slurm and Kubernetes
- ``slurm``, ``kubernetes``: one scheduler each; ``kubernetes_objects``: the Jobs that are submitted
- ``status``: the progress of a job; ``job_folder``: the files that the submitting machine keeps about a job
"""
