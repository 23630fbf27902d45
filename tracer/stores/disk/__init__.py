"""Files on a disk, and two ways to move their bytes without a copy: direct I/O and memory maps."""
