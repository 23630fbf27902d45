"""How often a recording takes each kind of message, to keep within its bounds."""
