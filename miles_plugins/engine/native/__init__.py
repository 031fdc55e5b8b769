"""Any engine behind SGLang's native HTTP routes: what `miles serve` runs.

`speaking` says what bodies and replies mean, `routes` is the server, `command` the words of the
command line.
"""
