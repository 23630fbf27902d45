"""Proof that recording changes nothing, and rehearsals of a recording."""
