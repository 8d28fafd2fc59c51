"""Telling people of incidents.

Whom (`config`), what is due (`duty`), in which words (`messages`), and the way there (`post`). One notice an
incident, however many symptoms it has; who acknowledges it stops it everywhere.
"""
