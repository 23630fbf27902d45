"""Files on a disk, and two ways to move their bytes without a copy: past the page cache, and by mapping them."""
