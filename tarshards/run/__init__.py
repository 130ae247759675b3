"""Commands over samples (``samples``, for tarproc) and over shards (``jobs``, for tarjob and kujob)."""
