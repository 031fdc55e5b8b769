"""Behind `miles.config` and `miles.check`: the override grammar, stages while they are put
together, sweeps, and faults that only a whole stage shows."""
