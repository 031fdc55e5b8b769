"""Behind `miles.config`: the override grammar, stages while they are put together, sweeps."""
