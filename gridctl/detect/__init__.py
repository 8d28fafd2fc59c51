"""Records of nodes in, findings, verdicts and decisions out. Pure: no clock, no chance, no file."""
