"""
Faults put into hvdlite and its launcher, one at a time, to see that a test finds each of them.

`faults` has the list. `trial` runs tests on a copy of the packages with one of them, and `inside` checks in that run
that the copy is what is tested. `python -m mutants` in tests/, and `test_mutants` at night, try them all.
"""
