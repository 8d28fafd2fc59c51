"""Costs, forecasts, risk, what ought to be done about a node, and which spare is best. Pure."""
