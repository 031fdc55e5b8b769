"""OpenEnv environments for miles: tasks (`environment`), one attempt (`stepping`), a server started
from a package (`starting`, and `serve` inside it), and a small environment (`guess`)."""
