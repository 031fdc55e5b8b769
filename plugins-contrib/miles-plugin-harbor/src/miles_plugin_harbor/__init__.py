"""Harbor for miles: tasks and trials (`environment`, `trials`), a run's sandbox as Harbor's place
(`places`, `boxes`), an agent of few lines (`agent`), two small tasks (`tasks`)."""
