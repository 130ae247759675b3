"""Commands over samples (``samples``, for tarproc) and over shards (``jobs``, for tarjob and kujob).

``guard`` ends what a killed run of either has left running.
"""
