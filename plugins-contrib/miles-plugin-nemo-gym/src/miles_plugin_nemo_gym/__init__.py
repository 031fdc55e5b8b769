"""NeMo Gym's resources servers for miles: tasks (`environment`), one attempt (`attempt`), the two
spellings of messages (`spelling`), a server started from the package (`serve`)."""
