"""A command over a thousand shards: one plan of tasks, run here, by Slurm or Kubernetes, resumed by markers."""
