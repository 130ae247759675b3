"""Commands over samples (``samples``, for tarproc) and over shards (``jobs``, for tarjob and kujob).

``guard`` ends the processes that a killed run of either leaves behind.
"""
