"""Speed, measured: this pipeline against the bare loop, against a limit, and against what others would use.

`make bench`, or `python -m benchmarks --help`. Every module here is a row of the table, or a family of rows; its
docstring says what is measured, how, and what was learned from it.
"""
