"""How often a recording takes what, so that it keeps within its bounds."""
