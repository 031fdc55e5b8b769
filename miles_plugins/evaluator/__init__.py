"""How a policy version is scored: the built-in evaluators, one module each."""
