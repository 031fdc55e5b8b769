"""An example plugin for miles: an environment (`environment`) and an observer (`plugin`)."""
