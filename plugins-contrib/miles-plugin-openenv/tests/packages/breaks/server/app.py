"""An environment package that cannot be imported."""

raise RuntimeError("no luck today")
