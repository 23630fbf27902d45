"""Messages, the bus that delivers them, and their subscribers."""
