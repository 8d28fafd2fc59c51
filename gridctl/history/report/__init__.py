"""A postmortem of one incident out of the journal's files; needs no controller.

`source.py` reads, `derive.py` says what a report says, `markdown.py` and `page.py` write it down. All but the
first are pure: the same journal gives the same bytes.
"""
