"""Behind `miles.plugins`: where names come from, what they must do, how they are listed."""
