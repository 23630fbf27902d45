"""Files on a disk, and the two ways past copies: writes past the page cache, and reads through mapped memory."""
