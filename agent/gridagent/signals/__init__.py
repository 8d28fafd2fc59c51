"""What kernels and drivers say, as typed events. Pure: no clock, no file, no state beyond a parser's own.

`lines` takes the wrapper off a log line, `nvidia` reads what the driver prints, `bursts` counts repeats
once, `values` tells a number from the many ways to say "unknown". Everything here takes text that users
can influence: patterns are anchored at the start of the message, work is linear in the input, and no
input raises.
"""
