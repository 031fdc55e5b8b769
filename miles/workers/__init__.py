"""Processes as the driver sees them: rollout workers, engines, weights on their way."""
