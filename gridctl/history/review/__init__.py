"""The week in review, out of the history.

What came, what was done and what it cost, and where people knew better:

`source.py` asks the history, `movers.py` says whose risk has changed, `document.py` how it is told.
"""
