"""Many traces, many subscribers: planned, computed on engines, kept."""
