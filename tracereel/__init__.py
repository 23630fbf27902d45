"""The command line: ``trace``, and ``tracereel`` on machines whose ``trace`` is another program.

stdout is data; stderr is progress and complaints. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the trace is damaged
(what could be read was given), 4 some traces (or parts of a batch) failed, 5 steps that were run again gave other
values, 6 a check found something of the severity given with ``--fail-on``, 130 interrupted.
``trace record`` ends with the exit code of the script, or with 6 if ``--stop-on`` found something.
"""
