"""OpenEnv environments for miles: tasks (`environment`), one attempt (`stepping`), a server started
from a package (`serve`), and a small environment (`guess`)."""
