"""Run a command for each of many shards: on this machine, by Slurm or by Kubernetes, resumed by done-markers.

Read in this order:

- ``job_plan``: items and a command to tasks; ``job_options``: what a job asks of a scheduler
- ``attempt``: what an attempt of an item notes before it starts, by which a later one knows what it has left
- ``worker``: runs one task and writes its markers; ``__main__``: the worker as a program, for Slurm;
  ``init_process``: the worker as process 1 of a container
- ``local_run``: tasks on this machine; ``scheduler``: what Slurm and Kubernetes have in common
- ``slurm``, ``kubernetes``: one scheduler each; ``kubernetes_objects``: the Jobs that are submitted
- ``status``: how far a job is; ``job_folder``: what this machine keeps of a job
"""
