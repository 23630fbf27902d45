"""Runs steps of a recorded run again, from a keyframe and by the script that trained, and compares the results."""
