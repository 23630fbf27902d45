"""Steps of a recorded run, run again from a keyframe by the script that trained, and compared with the recording."""
