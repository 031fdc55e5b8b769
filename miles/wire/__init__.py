"""What crosses a process boundary: frames, calls, and components mirrored on the other side."""
