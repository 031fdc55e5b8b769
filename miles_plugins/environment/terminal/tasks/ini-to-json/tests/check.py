"""Tests of ini-to-json: sections, keys and the types of values."""

from checking import expect, finish, json_of

server = {"host": "example.org", "port": 8080, "secure": True, "motd": "Hello; and = welcome"}
paths = {"root": "/srv/data", "depth": -3, "version": "1.10", "empty": ""}
expect("settings.json", json_of("settings.json"), {"server": server, "paths": paths})
expect("the type of secure", json_of("settings.json")["server"]["secure"] is True, True)
finish()
