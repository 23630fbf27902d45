"""What flows: messages, the bus that carries them, and those who subscribe."""
