"""Benchmarks: this pipeline's speed compared with a bare loop, with a limit, and with other libraries.

`make bench`, or `python -m benchmarks --help`. Every module here is one or more rows of the table; its docstring says
what is measured, how, and what was learned.
"""
