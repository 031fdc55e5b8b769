"""Behind `miles.check`: faults that only a whole stage shows."""
