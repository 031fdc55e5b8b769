"""Processes as the driver sees them: rollout workers, engines, weights on their way, and those that
share the session server's work."""
