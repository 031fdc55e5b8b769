"""The Lantern family for miles: a registration (`model`), its markup (`tito`), its module
(`modeling`)."""
