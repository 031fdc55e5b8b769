"""What runs inside a box: a supervisor that starts commands, kills them, and moves file contents.

These modules are sent to the box as code, compiled by the box's own interpreter, and import nothing
but cheap modules of the standard library and each other; any Python from 3.8 on runs them. They
decide nothing about isolation.
"""
