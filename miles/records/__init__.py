"""What a run counts and writes down about itself, and how it is read back."""
