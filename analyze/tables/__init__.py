"""Tables of answers: collecting, printing, writing."""
