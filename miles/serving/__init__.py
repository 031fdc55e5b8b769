"""A program that answers requests: as a child of another, or kept until it is told to stop."""
