"""What a run writes down about itself, and how it is read back."""
