"""Votes of people as rewards: the command `gerl vote`, its HTTP service and page, and the journal of the votes."""
