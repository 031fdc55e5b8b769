"""The server's side of the game."""
