"""TextArena's games for miles: tasks and episodes (`environment`), one game (`game`)."""
